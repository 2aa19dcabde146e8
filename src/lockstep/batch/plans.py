"""How the loaders that are in use split their batches over the ranks.

A tensor without a tag is recognised by its size, if the batches of all loaders in use have different sizes on this
rank. Every rank knows the sizes on all ranks, so that all of them choose the same way.

[Note: one training after the other] A process may train several models, each with loaders of its own. Those of an
earlier training may still be in use, as far as this process can tell: somebody keeps one, or a batch of it, or the
garbage collector has not come. So an engine goes by the loaders whose iterations began when those began that were under
way as it was made, or later: its answer is the same with another training before it.

[Note: who asks] Where sizes are ambiguous, ranks ask each other, which is a collective: all of them must, or none. But
how long a loader is in use depends on the garbage collector, and on who keeps a batch. So whether to ask is decided by
the loaders that were iterated last, in use or not: all ranks iterate the same ones in the same order.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from lockstep.batch.share import BatchShare, share_bounds
from lockstep.batch.tags import purge

__all__ = [
    "Division",
    "LoaderToken",
    "are_none",
    "divisions",
    "must_ask",
    "note_yielded",
    "num_registrations",
    "register",
    "reset",
    "was_yielded",
]


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
        """Size of the batch that a rank gets: its samples, or the rows of its filler.

        A filler has 1 row, or 2 where a full batch gives the rank 1 sample: so its size is never that of a full batch's
        share, and tells the two apart.

        >>> Division(5, 8, 8).rows(7), Division(5, 16, 8).rows(7)
        (2, 1)
        """
        begin, end = share_bounds(self.num_samples, rank, self.world_size)
        first, last = share_bounds(self.batch_size, rank, self.world_size)
        return end - begin or (2 if last - first == 1 else 1)

    def share(self, rank: int, evaluation: bool = False, source: object = None) -> BatchShare:
        """What a rank holds of it."""
        begin, end = share_bounds(self.num_samples, rank, self.world_size)
        own = self.rows(rank)
        return BatchShare(end - begin, self.num_samples, self.world_size, "", evaluation, own, source)

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


# The divisions of one loader and the rank it was iterated as, each with the number of its latest registration.
_Divisions: TypeAlias = dict[tuple[int, Division], int]

_NUM_RECENT = 64
# Of the loaders that were iterated last, in use or not, by their number; the last has begun or yielded last.
_recent: dict[int, tuple[weakref.ref[LoaderToken], _Divisions]] = {}
_lock = threading.Lock()
_num_registrations = 0
_num_gone = 0  # of loaders, which are in use no more
# Samples, ranks and `evaluation` of each batch that has come, with the number of the latest registration then.
_yielded: dict[tuple[int, int, bool], int] = {}


def register(token: LoaderToken, rank: int, batches: set[Division]) -> int:
    """An iteration of a loader begins, whose batches are of these divisions; returns its number. Local."""
    global _num_registrations
    purge()  # else loaders that are gone would make sizes ambiguous
    with _lock:
        _num_registrations += 1
        if batches:
            own = {(rank, division): _num_registrations for division in batches}
            reference, known = _recent.pop(token.number, (weakref.ref(token, _note_gone), {}))
            _recent[token.number] = reference, known | own
            if len(_recent) > _NUM_RECENT:
                del _recent[next(iter(_recent))]
        return _num_registrations


def _note_gone(_: object) -> None:
    global _num_gone
    _num_gone += 1


def num_registrations() -> int:
    """How many iterations of loaders have begun in this process. Local."""
    return _num_registrations


def are_none() -> bool:
    """Whether no loader is in use, nor was lately. Local."""
    return not _recent


def divisions(rank: int, world_size: int, since: int = 0) -> tuple[Division, ...]:
    """Those of the loaders in use that split over `world_size` ranks, of which this is `rank`; see `must_ask`. Local.

    A loader is in use from its first iteration on, as long as it or one of its batches exists.
    """
    return _find(rank, world_size, since, _num_registrations, _num_gone)[0] if _recent else ()


def must_ask(rank: int, world_size: int, since: int = 0) -> bool:
    """Whether a size may stand for batches of different numbers of samples, on some rank. Local.

    The same on all ranks; see [Note: who asks].

    Args:
        rank: as which loaders were iterated.
        world_size: over which they split.
        since: number of an iteration; loaders count that began one later.
    """
    return bool(_recent) and _find(rank, world_size, since, _num_registrations, _num_gone)[1]


@lru_cache(maxsize=64)
def _find(rank: int, world_size: int, since: int, *_: int) -> tuple[tuple[Division, ...], bool]:
    """The answers of `divisions` and `must_ask`, until a loader comes or goes."""
    with _lock:
        found = {
            (division, reference() is not None)
            for reference, of_loader in _recent.values()
            for (its_rank, division), registration in of_loader.items()
            if its_rank == rank and division.world_size == world_size
            if registration > since
        }
    is_ambiguous = any(
        len({(each.rows(rank), each.num_samples) for each, _ in found}) > len({each.rows(rank) for each, _ in found})
        for rank in range(world_size)
    )
    in_use = {division for division, is_in_use in found if is_in_use}
    return tuple(sorted(in_use, key=lambda each: (each.num_samples, each.batch_size))), is_ambiguous


def note_yielded(share: BatchShare) -> None:
    """A loader yields such a batch. Local."""
    _yielded[share.global_samples, share.world_size, share.evaluation] = _num_registrations
    number = share.source.number if isinstance(share.source, LoaderToken) else None
    with _lock:
        if number in _recent:  # else it would be forgotten for the loaders of many evaluations within its epoch
            _recent[number] = _recent.pop(number)


def was_yielded(division: Division, trains: bool, since: int = 0) -> bool:
    """Whether a batch of this size has come so far: of a loader for training, or of any. Local.

    Ranks that take the batches of their loaders in the same order find the same, in whatever order memory is freed.
    """
    size = division.num_samples, division.world_size
    latest = max(_yielded.get((*size, each), -1) for each in ((False,) if trains else (False, True)))
    return latest > since


def reset() -> None:
    """Forget all loaders. Local."""
    _yielded.clear()
    with _lock:
        _recent.clear()
    _find.cache_clear()
