"""Process sets: subsets of the ranks that run operations together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lockstep.compat.horovod.common.exceptions import UnsupportedError
from lockstep.compat.horovod.torch import runtime
from lockstep.errors import InputError

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "install", "invalidate_all", "remove_process_set"]

_BAD_RANKS = "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object"


class ProcessSet:
    """Ranks that run operations together.

    Must be registered by `hvd.init(process_sets=[…])` or `hvd.add_process_set`.

    Args:
        ranks_or_comm: global ranks, or an mpi4py communicator.

    Attributes:
        process_set_id: its number; None while it is not registered.
        ranks: global ranks, ascending.
        mpi_comm: the communicator it was created from, or None.

    Raises:
        InputError: the argument is neither.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if isinstance(ranks_or_comm, Iterable) and not isinstance(ranks_or_comm, str):
            ranks = list(ranks_or_comm)
            if any(not isinstance(rank, int) for rank in ranks):
                raise InputError(f"{_BAD_RANKS}, got {ranks}")
            self.ranks = sorted(ranks)
        elif hasattr(ranks_or_comm, "group") and hasattr(ranks_or_comm, "allgather"):
            self.mpi_comm = ranks_or_comm
            self.ranks = sorted(_ranks_of(ranks_or_comm))
        else:
            raise InputError(f"{_BAD_RANKS}, got {type(ranks_or_comm).__name__}")

    def size(self) -> int | None:
        """Number of ranks; None while it is not registered."""
        if self.process_set_id is None:
            return None
        return len(self._registered_ranks(self.process_set_id))

    def rank(self) -> int | None:
        """This process's rank in the set; None while it is not registered.

        Raises:
            InputError: this process is not in it.
        """
        if self.process_set_id is None:
            return None
        ranks = self._registered_ranks(self.process_set_id)
        own = runtime.current().world.rank
        if own not in ranks:
            raise InputError(f"Process is not part of provided process set: rank {own} is not among {list(ranks)}.")
        return ranks.index(own)

    def included(self) -> bool | None:
        """Whether this process is in the set; None before ranks are known."""
        if self.ranks is None:
            return None
        return runtime.current().world.rank in self.ranks

    def _registered_ranks(self, set_id: int) -> tuple[int, ...]:
        ranks = runtime.current().sets().get(set_id)
        if ranks is None:
            raise InputError("Process set does not exist or has not been registered.")
        return ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


def _ranks_of(comm: Any) -> list[int]:
    """Ranks in COMM_WORLD of a communicator's processes. Local."""
    from mpi4py import MPI

    numbers = list(range(comm.Get_size()))
    return [int(rank) for rank in comm.group.Translate_ranks(numbers, MPI.COMM_WORLD.group)]


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0

# Registered sets, to be invalidated at shutdown, because scripts keep these objects.
_in_use: list[ProcessSet] = []


def install(process_sets: Sequence[ProcessSet]) -> None:
    """Register the sets passed to `init`. Collective.

    Raises:
        InputError: a set is given twice, or has ranks that do not exist.
    """
    global_process_set.ranks = list(range(runtime.current().world.world_size))
    for index, process_set in enumerate(process_sets):
        if _find(process_set) is not None:
            raise InputError(
                f"Horovod could not be initialized because process_sets entry number {index} is a duplicate: "
                f"{process_set}"
            )
        _register(process_set)


def _find(process_set: ProcessSet) -> int | None:
    """The number of the registered set with the same ranks."""
    wanted = tuple(process_set.ranks or ())
    return next((set_id for set_id, ranks in runtime.current().sets().items() if ranks == wanted), None)


def _register(process_set: ProcessSet) -> None:
    world_size = runtime.current().world.world_size
    ranks = process_set.ranks or []
    if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < world_size for rank in ranks):
        raise InputError(f"a process set needs distinct ranks between 0 and {world_size - 1}, got {ranks}")
    runtime.current().agree("add", tuple(map(str, ranks)))
    process_set.process_set_id = runtime.current().add_set(tuple(ranks))
    _in_use.append(process_set)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set. Collective over all ranks, with the same set.

    Unlike Horovod's, needs no HOROVOD_DYNAMIC_PROCESS_SETS=1.

    Args:
        process_set: the set, or its ranks.

    Returns:
        The registered set.

    Raises:
        InputError: a set with the same ranks exists, or a rank does not exist.
        HorovodInternalError: ranks pass different sets.
    """
    runtime.current()
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if chosen.mpi_comm is not None:
        raise UnsupportedError(
            "Dynamically adding process sets defined by an MPI communicator is not implemented. Please build the "
            "process set via a list of ranks."
        )
    if _find(chosen) is not None:
        raise InputError(f"Attempted to add a duplicate process set: {chosen}")
    _register(chosen)
    return chosen


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Collective over all ranks.

    Returns:
        Whether it was removed: False for the global set, and if it is not registered.
    """
    set_id = process_set.process_set_id
    if set_id is None or set_id == 0:
        return False
    process_set.process_set_id = None
    opened = runtime.current()
    if set_id not in opened.sets():
        return False
    opened.agree("remove", (str(set_id),))
    opened.remove_set(set_id)
    if process_set in _in_use:
        _in_use.remove(process_set)
    return True


def invalidate_all() -> None:
    """Mark all sets as not registered, at shutdown. Local."""
    for process_set in _in_use:
        process_set.process_set_id = None
    _in_use.clear()
