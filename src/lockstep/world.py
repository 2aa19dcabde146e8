"""`lockstep.init()`: turns a process, however it was started, into a rank of a world.

[Note: rendezvous] Under our launcher the ranks of one host meet through a file in its private folder, and a single
process has nobody to meet: neither opens a port. Between hosts, rank 0 listens only on the address that the launcher
assigned to it. Under torchrun, or with `MASTER_ADDR` set by hand, ranks meet as in torch. The tasks of a Slurm step,
and ranks started by mpirun, compute an address themselves, or use a file if they are on one host (`rendezvous/`). An
explicit `store` or `init_method` always wins.

[Note: mpi] `backend="mpi"` is torch's own if PyTorch was built with MPI, and otherwise our group "mpi4py". With either,
MPI assigns the ranks and connects them.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist

from lockstep import agreement, env, seeding
from lockstep.comm import clock, exit_hooks, nccl_end, registration, torch_version
from lockstep.comm.backend import engine_of
from lockstep.comm.callsite import describe_exception
from lockstep.comm.names import BACKEND_NAME, MPI_BACKEND_NAME
from lockstep.comm.wire import choose_wire
from lockstep.device_choice import as_device, choose_device, takes_default_gpu, visible_gpus
from lockstep.errors import (
    AlreadyInitialized,
    BackendUnavailable,
    InputTypeError,
    NotInitialized,
    RendezvousError,
    SetupError,
)
from lockstep.log import get_logger, warn_once
from lockstep.mpi_library import is_installed as is_mpi4py_installed
from lockstep.mpi_library import load as load_mpi
from lockstep.network_interfaces import name_for_engines
from lockstep.placement import place_by_exchange
from lockstep.rank_status import EXIT_STOPPED
from lockstep.rendezvous import tcp
from lockstep.rendezvous.mpi import meet_by_mpi, meet_under_mpirun
from lockstep.rendezvous.slurm_store import meet_in_slurm
from lockstep.shm.support import lack as shared_memory_lack
from lockstep.stopping import StopSignals
from lockstep.topology import Topology, read_topology
from lockstep.topology.slurm import describe_allocation
from lockstep.torch_private.groups import group_count, plugin_backends, set_group_count
from lockstep.torch_private.stores import FileStore, HashStore, PrefixStore, Store

__all__ = ["World", "check_at_shutdown", "current_world", "init", "leave_open_world"]

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_MPI = "mpi"

_SHUT_DOWN = "this world was shut down; call lockstep.init() again to open another"

_current: World | None = None
# Number of rendezvous of this process in a launcher's folder, by folder.
_num_rendezvous: Counter[str] = Counter()
# Checks that higher layers run before a world is left.
_checks: list[Callable[[World], Callable[[], None] | None]] = []


class World:
    """The ranks of a job, as seen by one of them. Made by `lockstep.init`.

    A context manager: leaving it shuts the world down. If it is left by an exception, the other ranks are told first
    and raise `RankLost` with that exception's text.

    Attributes:
        rank: global rank, 0 … world_size-1.
        world_size: number of ranks.
        local_rank: rank among the processes of this host.
        local_world_size: number of ranks on this host.
        node_rank: number of this host.
        launcher: who started this process: "lockstep", "torchrun", "mpirun", "slurm", "environment" or "single".
        device: the device this rank computes on.
        backend: name of the process group's backend.
    """

    def __init__(self, topology: Topology, device: torch.device, backend: str, owns_group: bool) -> None:
        self.rank = topology.rank
        self.world_size = topology.world_size
        self.local_rank = topology.local_rank
        self.local_world_size = topology.local_world_size
        self.node_rank = topology.node_rank
        self.launcher = topology.launcher
        self.device = device
        self.backend = backend
        self._owns_group = owns_group
        self._group: dist.ProcessGroup | None = dist.group.WORLD
        self._clock_start_s = clock.total()
        self._stop_signals = StopSignals()
        self._pid = os.getpid()

    def __getattr__(self, name: str) -> NoReturn:
        known = ", ".join(each for each in (*vars(self), *vars(World)) if not each.startswith("_"))
        raise AttributeError(f"World has no attribute {name!r}. It has {known}")

    def _is_open(self) -> bool:
        # The script may also have destroyed the default group itself.
        return self._group is not None and dist.group.WORLD is self._group

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The default group of `torch.distributed`.

        Raises:
            NotInitialized: the world was shut down.
        """
        if self._group is None or not self._is_open():
            raise NotInitialized(_SHUT_DOWN)
        return self._group

    def communication_seconds(self) -> float:
        """Seconds this rank has spent in collectives since init, including waiting for other ranks. Local."""
        return clock.total() - self._clock_start_s

    def should_stop(self) -> bool:
        """Whether any rank has been told to stop by a signal; the same answer on every rank, at the same call.

        Ask at the end of each step; if True, save and exit with the code for unfinished work::

            optimizer.step()
            if world.should_stop():
                checkpoint.save(folder, state, step=step)
                sys.exit(lockstep.EXIT_STOPPED)

        From the first call on, every rank catches SIGTERM and SIGUSR1; `stop_on` chooses others. The signal may reach
        one rank, all of them, or the launcher (torchrun, srun, or `lockstep run`, which passes on SIGTERM only). The
        script's own handlers are called as well. After the first True, every call returns True.

        Collective: one all_reduce of one number. If the group only takes GPU tensors, each call returns the answer to
        the previous one, so that the host does not wait for the GPU.

        Raises:
            NotInitialized: the world was shut down.
            SetupError: the first call is not made in the main thread.
        """
        if not self._is_open():
            raise NotInitialized(_SHUT_DOWN)
        return self._stop_signals.should_stop()

    def stop_on(self, *signals: int) -> None:
        """Choose the signals that `should_stop` responds to from now on. Local; choose the same on every rank.

        With `signal.SIGINT` among them, Ctrl-C also lets all ranks finish their step and save, where KeyboardInterrupt
        would stop each at a different line. A second Ctrl-C interrupts.

            >>> import signal                                                              # doctest: +SKIP
            >>> world.stop_on(signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)               # doctest: +SKIP

        Args:
            signals: numbers, or members of `signal.Signals`; they replace SIGTERM and SIGUSR1. Signals that the process
                ignores stay ignored.

        Raises:
            InputError: an argument is not a signal, or cannot be caught.
            NotInitialized: the world was shut down.
            SetupError: not called in the main thread.
        """
        if not self._is_open():
            raise NotInitialized(_SHUT_DOWN)
        self._stop_signals.catch(signals)

    def shutdown(self) -> None:
        """Leave the world, and compare wrapped models with the ranks that answer in time. May be called twice.

        Ranks that still wait for this one raise RankLost.

        Raises:
            ModelError: the models that a `lockstep.DistributedDataParallel` wraps differ between ranks
                (`drift/comparison.py`). The world is left nevertheless.
        """
        afterwards: list[Callable[[], None] | None] = []
        try:
            # An error that is being raised must not be replaced by one that it caused.
            if self._is_open() and isinstance(sys.exc_info()[1], SystemExit | None):
                afterwards = [check(self) for check in _checks]
        finally:
            self._leave()
        for meet in filter(None, afterwards):
            meet()

    def _leave(self) -> None:
        global _current
        was_open = self._is_open()
        self._stop_signals.release()
        self._group = None
        if _current is self:
            _current = None
            seeding.forget_rank_streams()
        if was_open and self._owns_group:
            dist.destroy_process_group()

    def abort(self, reason: str | BaseException) -> None:
        """Leave the world because this rank has failed: the others raise `RankLost` with the reason. Local.

        Args:
            reason: an exception, or how a sentence about this rank continues, such as "has run out of disk".
        """
        engine = engine_of(self._group)
        if engine is not None:
            error = reason if isinstance(reason, BaseException) else None
            engine.fail(describe_exception(reason) if isinstance(reason, BaseException) else reason, error)
        self._leave()

    def __enter__(self) -> World:
        if not self._is_open():
            raise NotInitialized(_SHUT_DOWN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0, EXIT_STOPPED)):
            self.shutdown()
        else:
            self.abort(error)

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, world_size={self.world_size}, backend={self.backend!r}, device={self.device})"


def check_at_shutdown(check: Callable[[World], Callable[[], None] | None]) -> None:
    """Register `check(world)` to run just before a world is left without an error; it may raise. Local.

    If it returns a function, that is called after the world has been left, when no other rank waits for this one.
    """
    if check not in _checks:
        _checks.append(check)


def leave_open_world() -> None:
    """Do what the end of `with lockstep.init()` does, for a script without `with` that ends without an error. Local.

    Does nothing while non-daemon threads, which may still use the world, are running.

    Raises:
        ModelError: as `World.shutdown`.
    """
    world = current_world()
    is_last = all(each is threading.current_thread() or each.daemon for each in threading.enumerate())
    if world is not None and world._pid == os.getpid() and is_last:
        world.shutdown()


def current_world() -> World | None:
    """The world that `init` opened, or None if there is none or it was shut down."""
    if _current is not None and not _current._is_open():
        return None
    return _current


def init(
    backend: str = "auto",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    store: Store | None = None,
    device: str | torch.device | None = None,
    timeout: timedelta | float | None = None,
    wire: str | None = None,
    seed: int | None = None,
) -> World:
    """Join the other ranks of this job and initialise `torch.distributed`. Collective.

    Args:
        backend: "auto" (nccl where there are GPUs, else lockstep; gloo on systems other than Linux), "lockstep",
            "gloo", "nccl", "mpi", or any name that torch.distributed knows.
        rank: overrides the launcher's; requires `world_size`.
        world_size: overrides the launcher's; requires `rank`.
        init_method: a torch URL (env://, tcp://host:port, file:///path, mpi://) to meet at.
        store: a torch store to meet at.
        device: the device this rank computes on; by default its GPU with nccl, else the CPU.
        timeout: how long to wait for a rank before raising an error, in seconds or as a timedelta; default 30 minutes.
        wire: format in which sums of floats travel between hosts in lockstep groups: "fp32" (exact), "bf16", "fp16" or
            "int8", see `lockstep.comm.wire`; the same on all ranks. Defaults to LOCKSTEP_WIRE, else "fp32".
        seed: seeds the process-wide generators of torch (CPU and CUDA), numpy and `random` identically on all ranks, so
            that they draw the same initial weights. `lockstep.DistributedDataParallel` then moves every rank but the
            first to its own streams, derived from seed and rank: dropout masks differ between ranks, and rank 0 draws
            those of a single process. Creating the first engine moves numpy's and `random`'s streams. Torch's move when
            an engine's first forward pass begins, so that models made in between are identical too, unless the script
            has reseeded torch in between. With None, nothing is seeded.

    Returns:
        The world; a context manager.

    Raises:
        AlreadyInitialized: a world is open.
        BackendUnavailable: no such backend here; lists those there are, or says how to get it.
        InputError, InputTypeError: `seed` is not an integer that torch accepts as a seed.
        SetupError: contradictory arguments, an invalid environment variable, or more GPU ranks than GPUs.
        RendezvousError: other ranks did not arrive, or no meeting point was given.
        RankLost: a rank arrived and died.
        SharedMemoryError: the ranks' shared memory cannot be set up.

    >>> import lockstep
    >>> with lockstep.init(device="cpu") as world:
    ...     world.rank, world.world_size, world.backend
    (0, 1, 'lockstep')
    """
    global _current
    registration.ensure()
    env.check()
    open_world = current_world()
    if open_world is not None:
        raise AlreadyInitialized(
            f"lockstep.init() was called before and {open_world!r} is still open; call shutdown() on it first, or use "
            "lockstep.current_world()"
        )
    seed = None if seed is None else seeding.check_seed(seed)
    if dist.is_initialized():
        ignored = {"init_method": init_method, "store": store, "timeout": timeout, "wire": wire}
        _current = _adopt(backend, device, rank, world_size, [name for name, given in ignored.items() if given])
    else:
        _current = _open(backend, rank, world_size, init_method, store, device, timeout, wire)
    agreement.note_world(_current.world_size)
    if seed is not None:
        seeding.begin_common_stream(seed, _current.rank)
    exit_hooks.call_at_exit(leave_open_world)
    return _current


def _open(
    backend: str,
    rank: int | None,
    world_size: int | None,
    init_method: str | None,
    store: Store | None,
    device: str | torch.device | None,
    timeout: timedelta | float | None,
    wire: str | None,
) -> World:
    """A world with a new default group; see `init`."""
    if store is not None and init_method is not None:
        raise SetupError("both store and init_method were given, two ways to meet; pass one")
    limit = _as_timedelta(timeout)
    if _means_mpi4py(backend) and rank is None and world_size is None:
        topology, mpi_store = meet_by_mpi(limit)
        store = mpi_store if init_method is None and store is None else store
    else:
        topology = read_topology(env.snapshot(), rank=rank, world_size=world_size)
    torch_version.warn_if_untested(torch.__version__, topology.rank)
    choose_wire(wire)
    _hint_at_unused_allocation(topology)
    backend = _choose_backend(backend, topology, device)
    # This rank's GPU may depend on the others. If not, choose it now: a rank that raises here keeps no rank waiting.
    needs_place = "local_rank" in topology.unsaid and takes_default_gpu(backend, device)
    chosen_device = None if needs_place else choose_device(backend, topology, device)
    if backend != _MPI and store is None and init_method is None:
        store, init_method = _find_rendezvous(topology, limit)
        topology = _place(topology, store, limit, needs_place)
    chosen_device = chosen_device or choose_device(backend, topology, device)
    _meet(backend, topology, store, init_method, limit)
    if "nccl" in backend:
        nccl_end.abort_at_exit()
        # The current device is this rank's: `choose_device` has set it.
        warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context", UserWarning)
    return World(topology, chosen_device, backend, owns_group=True)


def _place(topology: Topology, store: Store | None, timeout: timedelta, by_gpus: bool) -> Topology:
    """The topology, completed through the store where variables set by hand leave something open."""
    if store is None or topology.launcher != "environment":
        return topology
    return place_by_exchange(topology, store, timeout, visible_gpus() if by_gpus else [])


def _meet(backend: str, topology: Topology, store: Store | None, init_method: str | None, timeout: timedelta) -> None:
    """Initialise torch.distributed."""
    if backend == _MPI:  # Torch's own needs no store, and warns of rank and world size.
        dist.init_process_group(backend, timeout=timeout)
        return
    names_given = group_count()
    try:
        dist.init_process_group(backend, init_method, timeout, topology.world_size, topology.rank, store)
    except dist.DistError as error:
        raise RendezvousError(
            f"rank {topology.rank} of {topology.world_size} did not meet the others "
            f"({init_method or type(store).__name__}): {str(error).splitlines()[0]}"
        ) from error
    finally:
        if not dist.is_initialized():
            # Groups meet under a numbered name. A failed attempt must not count: the ranks that this one meets in
            # the next attempt have not counted it.
            set_group_count(names_given)
    if topology.num_nodes > 1:
        _choose_interface_of_engines()
    _num_rendezvous[env.LOCKSTEP_RENDEZVOUS.get() or ""] += 1


def _choose_interface_of_engines() -> None:
    """Make Gloo and NCCL, in future groups, use the network interface by which this host reaches the others."""
    engine = engine_of(dist.group.WORLD)
    interface = None if engine is None else engine.team.interface
    address = env.MASTER_ADDR.get()
    if interface is None and address is not None:
        interface = name_for_engines(address)
    for variable in (env.GLOO_SOCKET_IFNAME, env.NCCL_SOCKET_IFNAME):
        if interface is not None and variable.get() is None:
            variable.set(interface)


def _adopt(
    backend: str, device: str | torch.device | None, rank: int | None, world_size: int | None, ignored: Sequence[str]
) -> World:
    """A world around a default group that the script made itself; shutdown leaves that group alone."""
    actual = dist.get_backend()
    if backend not in ("auto", actual) and not (_means_mpi4py(backend) and actual == MPI_BACKEND_NAME):
        raise AlreadyInitialized(
            f"torch.distributed is already initialised with backend {actual!r}; "
            f"lockstep.init(backend={backend!r}) cannot change it. Remove one of the two calls"
        )
    for name, given, there in (
        ("rank", rank, dist.get_rank()),
        ("world_size", world_size, dist.get_world_size()),
    ):
        if given not in (None, there):
            raise AlreadyInitialized(
                f"torch.distributed is already initialised with {name} {there}; lockstep.init({name}={given}) cannot "
                "change it. Remove one of the two calls"
            )
    if ignored:
        get_logger(__name__).warning(
            "torch.distributed is already initialised: lockstep.init() takes it over and ignores %s", ", ".join(ignored)
        )
    topology = read_topology(env.snapshot(), rank=dist.get_rank(), world_size=dist.get_world_size())
    return World(topology, choose_device(actual, topology, device), actual, owns_group=False)


def _as_timedelta(timeout: timedelta | float | None) -> timedelta:
    if timeout is None:
        return _DEFAULT_TIMEOUT
    try:
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except TypeError:
        raise InputTypeError(f"timeout is {timeout!r}; pass seconds as a number, or a datetime.timedelta") from None
    except (OverflowError, ValueError):  # inf, nan
        limit = timedelta(0)
    if limit <= timedelta(0):
        raise SetupError(f"timeout is {timeout}; pass seconds above 0, or None for 30 minutes")
    return limit


def _available_backends() -> list[str]:
    """Backend names that `init` accepts on this machine, besides "auto"."""
    names = [BACKEND_NAME]
    if dist.is_gloo_available():
        names.append("gloo")
    if dist.is_nccl_available() and torch.cuda.is_available():
        names.append("nccl")
    hidden = {*names, "fake"}
    if dist.is_mpi_available() or is_mpi4py_installed():
        names.append(_MPI)
    if not is_mpi4py_installed():
        hidden.add(MPI_BACKEND_NAME)
    return names + sorted(name for name in plugin_backends() if name not in hidden)


def _means_mpi4py(backend: object) -> bool:
    """Whether `backend` means our group over MPI. See [Note: mpi]."""
    name = backend.lower() if isinstance(backend, str) else ""
    return name == MPI_BACKEND_NAME or (name == _MPI and not dist.is_mpi_available())


def _choose_backend(backend: str, topology: Topology, device: str | torch.device | None) -> str:
    if not isinstance(backend, str):
        raise InputTypeError(f"backend is {backend!r}; give a name such as 'auto', 'lockstep', 'gloo' or 'nccl'")
    name = backend.lower()
    if name == "auto":
        wants_cpu = device is not None and as_device(device).type == "cpu"
        if torch.cuda.is_available() and dist.is_nccl_available() and not wants_cpu:
            return "nccl"
        return BACKEND_NAME if shared_memory_lack() is None else _stand_in(topology)
    names = _available_backends()
    chosen = []
    # "cpu:gloo,cuda:nccl" is torch's form for one backend per device type.
    for part in name.split(","):
        device_type, colon, kind = part.rpartition(":")
        if _means_mpi4py(kind):
            load_mpi()  # says what is missing
            kind = MPI_BACKEND_NAME
        elif kind not in names:
            raise BackendUnavailable(f"backend {backend!r} is not available here; there are: auto, {', '.join(names)}")
        chosen.append(f"{device_type}{colon}{kind}")
    return ",".join(chosen)


def _stand_in(topology: Topology) -> str:
    """The backend for systems whose ranks cannot share memory; logs one line about what is lost."""
    if topology.world_size > 1 and topology.rank == 0:
        warn_once(
            get_logger(__name__),
            f"{shared_memory_lack()}. This job's ranks use gloo: same results, but slower, and if a rank fails, the "
            "others get an error only when gloo notices, without names",
        )
    return "gloo"


def _hint_at_unused_allocation(topology: Topology) -> None:
    """Log one line for users who start a script in a batch script and forget `srun`."""
    allocation = describe_allocation(env.snapshot()) if topology.launcher == "single" else None
    if allocation is not None:
        warn_once(
            get_logger(__name__),
            f"{allocation}, but this process is alone: start the script with `srun python script.py` to use them, or "
            "with `lockstep run script.py` for ranks on this node alone",
        )


def _find_rendezvous(topology: Topology, timeout: timedelta) -> tuple[Store | None, str | None]:
    """The meeting point if none was given: see [Note: rendezvous]."""
    folder = env.LOCKSTEP_RENDEZVOUS.get()
    if folder is not None and (topology.rank, topology.world_size) == (env.RANK.get(), env.WORLD_SIZE.get()):
        if topology.num_nodes > 1:
            return _meet_at_master(topology, timeout), None
        _check_private(folder)
        return _store_in(folder, _num_rendezvous[folder], topology.world_size), None
    if topology.world_size == 1:
        return HashStore(), None
    found = meet_in_slurm(env.snapshot(), topology, timeout)
    if found is not None:
        return found, None
    if env.MASTER_ADDR.get() is None or env.MASTER_PORT.get() is None:
        found = meet_under_mpirun(env.snapshot(), topology, timeout)
        if found is not None:
            return found, None
        missing = " and ".join(each.name for each in (env.MASTER_ADDR, env.MASTER_PORT) if each.get() is None)
        raise RendezvousError(
            f"rank {topology.rank} of {topology.world_size} does not know where to meet the others: no {missing}. "
            "Start the script with `lockstep run --nproc N script.py`, or give init_method or "
            "store"
        )
    if env.TORCHELASTIC_USE_AGENT_STORE.get() == "True":
        return None, "env://"  # torchrun's own process listens there
    return _meet_at_master(topology, timeout), None


def _store_in(folder: str, number: int, world_size: int) -> Store:
    """A new store in the launcher's folder, in memory that outlives the folder if the launcher provided some."""
    with contextlib.suppress(OSError):
        memory = os.readlink(os.path.join(folder, "store"))
        os.close(os.open(memory, os.O_RDWR | os.O_CLOEXEC))
        return PrefixStore(f"world{number}", FileStore(memory, -1))
    # One file per rendezvous, because torch removes a file with its last user, late or early.
    path = os.path.join(folder, f"store-{number}")
    try:  # torch would try again for minutes
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise SetupError(
            f"environment variable LOCKSTEP_RENDEZVOUS={folder!r}: no file can be made there ({error.strerror}). "
            "The launcher makes the folder for its ranks: unset it, or start the script with `lockstep run`"
        ) from None
    return FileStore(path, world_size)


def _check_private(folder: str) -> None:
    """Check the folder in which the ranks of one host meet.

    Raises:
        SetupError: it does not exist, or other users may put files there, which the ranks would trust.
    """
    place = f"environment variable LOCKSTEP_RENDEZVOUS={folder!r}:"
    if not os.path.isdir(folder):
        raise SetupError(
            f"{place} there is no such folder. The launcher makes it for its ranks and removes it in the end. If this "
            "job runs, something else has removed it, such as a cleanup of temporary files: set TMPDIR to a folder of "
            "your own. If it does not, unset the variable, or start the script with `lockstep run`"
        )
    state = os.stat(folder)
    if state.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(state.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        raise SetupError(
            f"{place} it belongs to user {state.st_uid} with mode {stat.S_IMODE(state.st_mode):04o}, so others than "
            f"user {os.geteuid()} can put files there, which the ranks would believe. `chmod 700` a folder of your "
            "own, or unset the variable and start the script with `lockstep run`, which makes one"
        )


def _meet_at_master(topology: Topology, timeout: timedelta) -> Store:
    """A store that listens only on the address by which all ranks know rank 0."""
    address, port = env.MASTER_ADDR.get(), env.MASTER_PORT.get()
    if address is None or port is None:
        raise RendezvousError(
            f"rank {topology.rank} of {topology.world_size} does not know where to meet the ranks of the other hosts: "
            "MASTER_ADDR and MASTER_PORT, which the launcher sets, are not set here"
        )
    return tcp.open_store(address, port, topology.rank, topology.world_size, timeout)
