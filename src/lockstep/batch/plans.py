"""How the loaders in use split their batches over the ranks.

A tensor without a tag is recognised by its size, if the batches of all loaders in use differ in size on this rank.
Every rank knows the sizes on all ranks, so all of them decide alike.

[Note: one training after the other] A process may train several models, each with its own loaders. Loaders of an
earlier training may still seem to be in use: the script keeps one, or a batch of it, or the garbage collector has not
run yet. So an engine ignores loaders whose iterations all began before the oldest iteration that was running when it
was created: its results do not depend on earlier trainings.

[Note: who asks] If sizes are ambiguous, ranks ask each other, which is a collective: all of them must, or none. But how
long a loader is in use depends on the garbage collector, and on references to its batches. So whether to ask is decided
by the loaders that were iterated last, in use or not: all ranks iterate the same ones in the same order.
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
    """How global batches of one size are split.

    Attributes:
        num_samples: samples in the global batch.
        batch_size: samples in the loader's full batches.
        world_size: number of ranks.
    """

    num_samples: int
    batch_size: int
    world_size: int

    def rows(self, rank: int) -> int:
        """Number of rows of the batch that a rank gets: its samples, or those of its filler.

        A filler has 1 row, or 2 if a full batch gives the rank 1 sample. So its size always differs from that of a full
        batch's share, which distinguishes the two.

        >>> Division(5, 8, 8).rows(7), Division(5, 16, 8).rows(7)
        (2, 1)
        """
        begin, end = share_bounds(self.num_samples, rank, self.world_size)
        first, last = share_bounds(self.batch_size, rank, self.world_size)
        return end - begin or (2 if last - first == 1 else 1)

    def share(self, rank: int, evaluation: bool = False, source: object = None) -> BatchShare:
        """A rank's share of such a batch."""
        begin, end = share_bounds(self.num_samples, rank, self.world_size)
        own = self.rows(rank)
        return BatchShare(end - begin, self.num_samples, self.world_size, "", evaluation, own, source)

    @property
    def is_even(self) -> bool:
        """Whether all ranks hold the same number of samples."""
        return self.num_samples % self.world_size == 0

    @property
    def rows_of_ranks(self) -> tuple[int, ...]:
        """Rows of each rank, including those of fillers."""
        return tuple(map(self.rows, range(self.world_size)))


class LoaderToken:
    """Represents one loader. Lives as long as the loader, an iteration of it, or a batch that it yielded.

    Attributes:
        number: unique among the loaders of this process.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._numbers)


# The divisions of one loader, with the rank it was iterated as; each with the number of its latest registration.
_Divisions: TypeAlias = dict[tuple[int, Division], int]

_NUM_RECENT = 64
# The same for the loaders iterated last, in use or not, by their number, in the order of their last begin or yield.
_recent: dict[int, tuple[weakref.ref[LoaderToken], _Divisions]] = {}
_lock = threading.Lock()
_num_registrations = 0
_num_gone = 0  # number of loaders that are no longer in use
# Samples, ranks and `evaluation` of the batches yielded, with the number of the latest registration at that time.
_yielded: dict[tuple[int, int, bool], int] = {}


def register(token: LoaderToken, rank: int, batches: set[Division]) -> int:
    """Register an iteration of a loader whose batches have these divisions; returns its number. Local."""
    global _num_registrations
    purge()  # otherwise loaders that no longer exist would make sizes ambiguous
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
    """Number of loader iterations begun in this process. Local."""
    return _num_registrations


def are_none() -> bool:
    """Whether no loader is in use, or was recently. Local."""
    return not _recent


def divisions(rank: int, world_size: int, since: int = 0) -> tuple[Division, ...]:
    """Divisions of the loaders in use that are iterated as `rank` of `world_size`; arguments as in `must_ask`. Local.

    A loader is in use from its first iteration until neither it nor any of its batches exists.
    """
    return _find(rank, world_size, since, _num_registrations, _num_gone)[0] if _recent else ()


def must_ask(rank: int, world_size: int, since: int = 0) -> bool:
    """Whether, on any rank, a size may belong to batches with different numbers of samples. Local.

    The same on all ranks; see [Note: who asks].

    Args:
        rank: rank that the loaders were iterated as.
        world_size: number of ranks that they split over.
        since: number of an iteration; only loaders that began a later one count.
    """
    return bool(_recent) and _find(rank, world_size, since, _num_registrations, _num_gone)[1]


@lru_cache(maxsize=64)
def _find(rank: int, world_size: int, since: int, *_: int) -> tuple[tuple[Division, ...], bool]:
    """The results of `divisions` and `must_ask`; valid until a loader comes or goes."""
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
    """Note that a loader yields a batch with this share. Local."""
    _yielded[share.global_samples, share.world_size, share.evaluation] = _num_registrations
    number = share.source.number if isinstance(share.source, LoaderToken) else None
    with _lock:
        if number in _recent:  # otherwise loaders of many evaluations within its epoch would displace it
            _recent[number] = _recent.pop(number)


def was_yielded(division: Division, trains: bool, since: int = 0) -> bool:
    """Whether a batch of this size has been yielded: by a training loader if `trains`, else by any. Local.

    Ranks that iterate over their loaders in the same order get the same answer, in any order of freeing memory.
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
