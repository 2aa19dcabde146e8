"""How the loaders that are in use split their batches over the ranks.

A tensor without a tag is recognised by its size, if the batches of all loaders in use have different sizes on this
rank. Every rank knows the sizes on all ranks, so that all of them choose the same way.

[Note: who asks] Where sizes are ambiguous, ranks ask each other, which is a collective: all of them must, or none. But
how long a loader is in use depends on the garbage collector, and on who keeps a batch. So whether to ask is decided by
the loaders that were iterated last, in use or not: all ranks iterate the same ones in the same order.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from lockstep.batch.share import BatchShare, filler_rows, share_bounds
from lockstep.batch.tags import purge

__all__ = ["Division", "LoaderToken", "divisions", "must_ask", "note_yielded", "register", "reset", "was_yielded"]


@dataclass(frozen=True)
class Division:
    """A size of global batches, and how it is split.

    Attributes:
        num_samples: of the global batch.
        batch_size: of the loader's full batches.
        world_size: number of ranks.
    """

    num_samples: int
    batch_size: int
    world_size: int

    def rows(self, rank: int) -> int:
        """Size of the batch that a rank gets: its samples, or the rows of its filler."""
        begin, end = share_bounds(self.num_samples, rank, self.world_size)
        return end - begin or filler_rows(self.batch_size, rank, self.world_size)

    def share(self, rank: int) -> BatchShare:
        """What a rank holds of it."""
        begin, end = share_bounds(self.num_samples, rank, self.world_size)
        return BatchShare(end - begin, self.num_samples, self.world_size)

    @property
    def is_even(self) -> bool:
        """Whether all ranks hold equally many samples."""
        return self.num_samples % self.world_size == 0

    @property
    def rows_of_ranks(self) -> tuple[int, ...]:
        """Rows of each rank, those of fillers included."""
        return tuple(map(self.rows, range(self.world_size)))


class LoaderToken:
    """Stands for one loader. It lives as long as the loader, an iteration of it, or a batch that it yielded.

    Attributes:
        number: no other loader of this process has it.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._numbers)


_NUM_RECENT = 64
# Of each loader in use: its divisions, and the rank it was iterated as.
_registered: weakref.WeakKeyDictionary[LoaderToken, set[tuple[int, Division]]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_num_registrations = 0
# The same of the loaders that were iterated last, in use or not, by their number; the latest is the last.
_recent: dict[int, set[tuple[int, Division]]] = {}
_yielded: set[tuple[int, int, bool]] = set()  # samples, ranks and `evaluation` of each batch that has come
# By rank and world size: what `divisions` found, and for which loaders. Loaders come by a registration, and go by
# leaving fewer behind, so the numbers of both say whether it still holds.
_found: dict[tuple[int, int], tuple[tuple[int, int], tuple[Division, ...]]] = {}


def register(token: LoaderToken, rank: int, batches: set[Division]) -> None:
    """An iteration of a loader begins, whose batches are of these divisions. Local."""
    global _num_registrations
    purge()  # else loaders that are gone would make sizes ambiguous
    with _lock:
        _num_registrations += 1
        _registered.setdefault(token, set()).update((rank, division) for division in batches)
        if batches:
            _recent[token.number] = _recent.pop(token.number, set()) | {(rank, division) for division in batches}
            if len(_recent) > _NUM_RECENT:
                del _recent[next(iter(_recent))]


def divisions(rank: int, world_size: int) -> tuple[Division, ...]:
    """Those of the loaders in use that split over `world_size` ranks, of which this is `rank`. Local.

    A loader is in use from its first iteration on, as long as it or one of its batches exists.
    """
    if not _registered:
        return ()
    state = _num_registrations, len(_registered)
    known = _found.get((rank, world_size))
    if known is not None and known[0] == state:
        return known[1]
    with _lock:
        state = _num_registrations, len(_registered)
        found = _split_over(list(_registered.values()), rank, world_size)
    in_order = tuple(sorted(found, key=lambda each: (each.num_samples, each.batch_size)))
    _found[rank, world_size] = state, in_order
    return in_order


def _split_over(loaders: Iterable[set[tuple[int, Division]]], rank: int, world_size: int) -> set[Division]:
    """The divisions over so many ranks, of loaders that were iterated as this one."""
    return {
        division
        for of_loader in loaders
        for its_rank, division in of_loader
        if its_rank == rank and division.world_size == world_size
    }


def note_yielded(share: BatchShare) -> None:
    """A loader yields such a batch. Local."""
    _yielded.add((share.global_samples, share.world_size, share.evaluation))


def was_yielded(division: Division, trains: bool) -> bool:
    """Whether a batch of this size has come so far: of a loader for training, or of any. Local.

    Ranks that take the batches of their loaders in the same order find the same, in whatever order memory is freed.
    """
    size = division.num_samples, division.world_size
    return (*size, False) in _yielded or (not trains and (*size, True) in _yielded)


def reset() -> None:
    """Forget all loaders. Local."""
    _yielded.clear()
    with _lock:
        _registered.clear()
        _found.clear()
        _recent.clear()
    _must_ask.cache_clear()


def must_ask(rank: int, world_size: int) -> bool:
    """Whether a size may stand for batches of different numbers of samples, on some rank. Local.

    The same on all ranks; see [Note: who asks].

    Args:
        rank: as which loaders were iterated.
        world_size: over which they split.
    """
    return bool(_recent) and _must_ask(rank, world_size, _num_registrations)


@lru_cache(maxsize=64)
def _must_ask(rank: int, world_size: int, _: int) -> bool:
    with _lock:
        found = _split_over(_recent.values(), rank, world_size)
    for rank in range(world_size):
        by_rows: dict[int, int] = {}
        for division in found:
            rows = division.rows(rank)
            if by_rows.setdefault(rows, division.num_samples) != division.num_samples:
                return True
    return False
