"""`hvd.init()`, and queries of ranks and features."""

from __future__ import annotations

import atexit
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep import env
from lockstep.comm.names import MPI_BACKEND_NAME
from lockstep.compat.horovod.torch import process_sets as sets
from lockstep.compat.horovod.torch import runtime
from lockstep.compat.horovod.torch.process_sets import ProcessSet
from lockstep.errors import InputError
from lockstep.mpi_library import is_installed as is_mpi4py_installed
from lockstep.world import current_world
from lockstep.world import init as init_world

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

_DYNAMIC = "dynamic"


def init(comm: Sequence[int] | Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the other ranks of the job. Collective; does nothing if called again.

    Opens a world by `lockstep.init()`, or uses an open one and torch.distributed's default group.

    Args:
        comm: None, a list of all ranks, or mpi4py's COMM_WORLD.
        process_sets: process sets to register; the same on all ranks. "dynamic" is accepted.

    Raises:
        InputError: `comm` is a subset of the ranks (see `ProcessSet`), or a set is given twice.
        SetupError: rendezvous failed.
    """
    if runtime.is_open():
        return
    chosen = _check_process_sets(process_sets)
    world = found = current_world()
    if world is None:
        world = init_world("mpi" if _is_communicator(comm) else "auto")
    try:
        _check_comm(comm, world.world_size)
        opened = runtime.open_runtime(world, owns_world=found is None)
        sets.install(chosen)
    except BaseException:
        shutdown()
        if found is None:
            world.shutdown()
        raise
    # Destroying the groups before the interpreter exits lets other ranks detect that this one leaves.
    atexit.unregister(shutdown)
    atexit.register(shutdown)
    _publish_variables()
    path = env.HOROVOD_TIMELINE.get()
    if path is not None and path.lower() != _DYNAMIC and world.rank == 0:
        opened.timeline.start(path, bool(env.HOROVOD_TIMELINE_MARK_CYCLES.get()))


def _check_process_sets(process_sets: Sequence[ProcessSet] | str | None) -> list[ProcessSet]:
    if process_sets is None or (isinstance(process_sets, str) and process_sets.lower() == _DYNAMIC):
        return []
    if isinstance(process_sets, str):
        raise InputError(f"process_sets is {process_sets!r}; expected a list of hvd.ProcessSet, None or 'dynamic'")
    return list(process_sets)


def _is_communicator(comm: object) -> bool:
    return comm is not None and not isinstance(comm, Iterable)


def _check_comm(comm: Any, world_size: int) -> None:
    if _is_communicator(comm):
        if not hasattr(comm, "Get_size"):
            raise InputError("Invalid type of argument comm. Expected list of rank integers or mpi4py.MPI.Comm object.")
        given = int(comm.Get_size())
    else:
        ranks = list(comm or range(world_size))
        given = len(ranks) if sorted(ranks) == list(range(world_size)) else -1
    if given != world_size:
        raise InputError(
            f"hvd.init(comm={comm!r}): a subset of the {world_size} ranks is refused; start the script on those only, "
            "or use hvd.ProcessSet for operations among some of the ranks"
        )


def _publish_variables() -> None:
    """Set the variables of horovodrun, for scripts that read them."""
    world = runtime.current().world
    for variable, number in (
        (env.HOROVOD_RANK, rank()),
        (env.HOROVOD_SIZE, size()),
        (env.HOROVOD_LOCAL_RANK, local_rank()),
        (env.HOROVOD_LOCAL_SIZE, local_size()),
        (env.HOROVOD_CROSS_RANK, world.node_rank),
        (env.HOROVOD_CROSS_SIZE, cross_size()),
    ):
        variable.set(number)
    env.HOROVOD_HOSTNAME.set(env.HOROVOD_HOSTNAME.get() or socket.gethostname())


def shutdown() -> None:
    """Leave the job. Local; ranks that wait for this one get HorovodInternalError. `init` may be called again."""
    runtime.close()
    sets.invalidate_all()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not."""
    return runtime.is_open()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to write a Chrome trace. Every rank may call it; rank 0 writes.

    Unlike Horovod's, needs no HOROVOD_TIMELINE=DYNAMIC.

    Args:
        file_path: path of the file, which is overwritten.
        mark_cycles: whether to mark each negotiation round.

    Raises:
        NotInitializedError: before `init`.
    """
    if runtime.current().world.rank == 0:
        runtime.current().timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """Stop writing the trace.

    Raises:
        NotInitializedError: before `init`.
    """
    runtime.current().timeline.stop()


def size() -> int:
    """Number of ranks."""
    return runtime.current().world.world_size


def local_size() -> int:
    """Number of ranks on this host."""
    return runtime.current().world.local_world_size


def cross_size() -> int:
    """Number of hosts that have a rank with this rank's local rank."""
    own = local_rank()
    # Each host is counted once per local rank.
    return round(sum(1 / count for count in runtime.current().local_sizes if count > own))


def rank() -> int:
    """Global rank."""
    return runtime.current().world.rank


def local_rank() -> int:
    """Rank among those of this host."""
    return runtime.current().world.local_rank


def cross_rank() -> int:
    """Number of this host."""
    return runtime.current().world.node_rank


def is_homogeneous() -> bool:
    """Whether all hosts have equally many ranks."""
    return len(set(runtime.current().local_sizes)) == 1


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads; Lockstep's group uses one.

    Raises:
        InputError: the ranks do not use MPI.
    """
    if not mpi_enabled():
        raise InputError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")
    return True


def mpi_enabled() -> bool:
    """Whether the ranks communicate through MPI."""
    return runtime.is_open() and MPI_BACKEND_NAME in runtime.current().world.backend


def mpi_built() -> bool:
    """Whether mpi4py is installed."""
    return is_mpi4py_installed()


def gloo_enabled() -> bool:
    """Whether the ranks communicate without MPI, as with Horovod's Gloo controller."""
    return runtime.is_open() and not mpi_enabled()


def gloo_built() -> bool:
    """Whether PyTorch has Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """NCCL's version as a number such as 22703, or 0 without GPUs."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """False: IBM's DDL is not supported."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not supported."""
    return False


def cuda_built() -> bool:
    """Whether PyTorch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether PyTorch was built for ROCm."""
    return torch.version.hip is not None
