"""What this machine has for training, what it lacks, and what to do about it."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep import env
from lockstep.errors import LockstepError
from lockstep.launch.environment import visible_cores, visible_gpus

__all__ = ["Finding", "examine"]

_FEW_FILES = 1024
_MIB = 1 << 20


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was looked at.
        text: what there is.
        remedy: what to do; empty if all is well.
        is_needed: training cannot work without it.
    """

    subject: str
    text: str
    remedy: str = ""
    is_needed: bool = False


def examine() -> Iterator[Finding]:
    """Look at everything, one after the other. Local; imports torch."""
    for look in (_look_at_torch, _look_at_cores, _look_at_gpus, _look_at_shared_memory, _look_at_limits, _look_at_name):
        yield look()
    yield from _look_at_companions()


def _look_at_torch() -> Finding:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return Finding("torch", f"cannot be imported: {error}", "install PyTorch 2.6 or newer", is_needed=True)
    kinds = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    built = ", ".join(name for name, is_there in kinds.items() if is_there) or "no backend"
    return Finding("torch", f"{torch.__version__} with {built}; Python {platform.python_version()}")


def _look_at_cores() -> Finding:
    cores, threads = visible_cores(), env.OMP_NUM_THREADS.get()
    text = f"{cores} for this process" + (f", OMP_NUM_THREADS={threads}" if threads else "")
    if threads and threads.isdigit() and int(threads) > cores:
        return Finding("cores", text, f"unset OMP_NUM_THREADS, or set it to {cores} divided by the number of ranks")
    return Finding("cores", text)


def _look_at_gpus() -> Finding:
    gpus = visible_gpus(env.snapshot())
    if gpus == 0:
        return Finding("GPUs", "none")
    import torch

    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if usable < gpus:
        return Finding(
            "GPUs", f"{gpus}, of which torch can use {usable}", "install a CUDA build of PyTorch that fits the driver"
        )
    return Finding("GPUs", f"{gpus}: {', '.join(sorted({torch.cuda.get_device_name(gpu) for gpu in range(gpus)}))}")


def _look_at_shared_memory() -> Finding:
    from lockstep.shm.segment import Segment

    try:
        segment = Segment.create(_MIB)
        segment.memory[0] = 1
        segment.release()
    except (LockstepError, OSError) as error:
        return Finding("shared memory", str(error), "see the message", is_needed=True)
    folder = env.LOCKSTEP_SHM_DIR.get() or "/dev/shm"
    free = ""
    with contextlib.suppress(OSError):
        free = (
            f"; {folder} has {shutil.disk_usage(folder).free // _MIB} MiB free, which only LOCKSTEP_SHM_DIR would use"
        )
    return Finding("shared memory", f"works{free}")


def _look_at_limits() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FEW_FILES:
        return Finding("open files", f"at most {soft}", f"raise it: ulimit -n {min(hard, 65536)}")
    return Finding("open files", f"at most {soft}")


def _look_at_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return Finding("host name", f"{name}, which does not resolve", f"add a line for {name} to /etc/hosts")
    return Finding("host name", f"{name}, {address}")


def _look_at_companions() -> Iterator[Finding]:
    """What only some need: absence is no fault."""
    programs: dict[str, tuple[Callable[[], bool], str]] = {
        "MPI": (
            lambda: shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None,
            "for backend mpi: an MPI library, and pip install torch-lockstep[mpi]",
        ),
        "Slurm": (lambda: shutil.which("srun") is not None, "for --slurm: run it on a cluster's login node"),
        "py-spy": (lambda: shutil.which("py-spy") is not None, "for --stacks-on-timeout: pip install py-spy"),
    }
    for name, (is_there, use) in programs.items():
        yield Finding(name, "there" if is_there() else f"not there ({use})")
