"""How the loaders that are in use split their batches over the ranks.

A tensor without a tag is recognised by its size, if the batches of all loaders in use have different sizes on this
rank. Every rank knows the sizes on all ranks, so that all of them choose the same way.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from functools import lru_cache

from lockstep.batch.share import BatchShare, filler_rows, share_bounds
from lockstep.batch.tags import purge

__all__ = ["Division", "LoaderToken", "divisions", "is_ambiguous", "register", "reset"]


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
    """Stands for one loader. It lives as long as the loader, an iteration of it, or a batch that it yielded."""


# Of each loader in use: its divisions, and the rank it was iterated as.
_registered: weakref.WeakKeyDictionary[LoaderToken, set[tuple[int, Division]]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_num_registrations = 0
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
        found = {
            division
            for of_source in list(_registered.values())
            for its_rank, division in of_source
            if its_rank == rank and division.world_size == world_size
        }
    in_order = tuple(sorted(found, key=lambda each: (each.num_samples, each.batch_size)))
    _found[rank, world_size] = state, in_order
    return in_order


def reset() -> None:
    """Forget all loaders. Local."""
    with _lock:
        _registered.clear()
        _found.clear()


@lru_cache(maxsize=64)
def is_ambiguous(found: tuple[Division, ...]) -> bool:
    """Whether on some rank batches of different numbers of samples have the same size."""
    for rank in range(found[0].world_size if found else 0):
        by_rows: dict[int, int] = {}
        for division in found:
            rows = division.rows(rank)
            if by_rows.setdefault(rows, division.num_samples) != division.num_samples:
                return True
    return False
