"""One pass over an epoch on one rank: which batch is in use, and how far the epoch is consumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from lockstep import batch
from lockstep.batch import BatchShare
from lockstep.data.order import Fetch, Schedule
from lockstep.data.seeding import preserve_global_rngs
from lockstep.errors import DataError

__all__ = ["EpochIterator", "Progress", "Publication", "RankBatchSampler"]


@dataclass
class Progress:
    """How far one iteration got; what a checkpoint of the loader is made from.

    Attributes:
        epoch: the epoch it walks.
        consumed: global samples of that epoch in the batches yielded so far. Batches that
            workers have fetched ahead do not count.
        finished: the epoch was walked to its end.
    """

    epoch: int
    consumed: int
    finished: bool = False


class Publication:
    """Publishes the share of one iteration's latest batch, and takes it back when it ends.

    Iterations nest: an evaluation runs inside a training loop. When the inner one ends, the batch
    yielded last is again the outer one's, so its share is published again; a forward pass of the
    training loop after the evaluation is weighted as one before it.
    """

    # Those that have published and are not over; the one that published last is at the end.
    # One list per process, as there is one current share.
    _open: ClassVar[list[Publication]] = []

    def __init__(self) -> None:
        self._share: BatchShare | None = None

    def publish(self, share: BatchShare) -> None:
        """Make `share` the current one."""
        opened = Publication._open
        if not opened or opened[-1] is not self:
            if self in opened:
                opened.remove(self)
            opened.append(self)
        self._share = share
        batch.publish(share)

    def close(self) -> None:
        """Take the share back, unless somebody has published another since. May be called twice."""
        opened = Publication._open
        if self not in opened:
            return
        opened.remove(self)
        # Identity, not equality: another loader's share may be equal, and must stay.
        if batch.current() is self._share:
            outer = opened[-1]._share if opened else None
            if outer is None:
                batch.clear()
            else:
                batch.publish(outer)
        self._share = None


class RankBatchSampler:
    """The `batch_sampler` that torch's loader sees: the schedule of the newest iteration.

    torch asks for an iterator over it as an iteration begins, also of worker processes that stay
    from one epoch to the next, and by then the loader has put the schedule here.
    """

    def __init__(self) -> None:
        self.schedule: Schedule | None = None

    def _current(self) -> Schedule:
        if self.schedule is None:
            raise DataError(
                "loader.batch_sampler holds this rank's batches of the epoch under way, and no epoch has begun: "
                "iterate the loader itself"
            )
        return self.schedule

    def __iter__(self) -> Iterator[Fetch]:
        return iter(self._current())

    def __len__(self) -> int:
        return len(self._current())


class EpochIterator(Iterator[Any]):
    """Yields this rank's batches of one epoch and publishes the share of each.

    Ends like any iterator; dropping it halfway (`break`) or calling `close` takes the published
    share back and stops workers that do not persist.

    Args:
        batches: torch's iterator over `schedule`, collated.
        schedule: this rank's batches.
        progress: updated with every batch yielded.
        publication: publishes the shares.
        preserve_rngs: samples are fetched in this process by code that seeds the process-wide
            generators; put those back after each batch.
        shared_workers: the sampler of the worker pool that this iteration shares with later
            ones of its loader; None when it has workers of its own, or none.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        schedule: Schedule,
        progress: Progress,
        publication: Publication,
        *,
        preserve_rngs: bool,
        shared_workers: RankBatchSampler | None,
    ) -> None:
        self._batches = batches
        self._schedule = schedule
        self._progress = progress
        self._publication = publication
        self._preserve_rngs = preserve_rngs
        self._shared_workers = shared_workers
        self._number = 0  # of the batch that comes next
        self._full_share: BatchShare | None = None

    def __iter__(self) -> EpochIterator:
        return self

    def __len__(self) -> int:
        """Number of batches that this iteration yields on this rank, from its first one."""
        return len(self._schedule)

    def __next__(self) -> Any:
        if self._shared_workers is not None and self._shared_workers.schedule is not self._schedule:
            raise DataError(
                f"this iteration of epoch {self._progress.epoch} is over: a newer one took over its worker processes. "
                "With persistent_workers=True a loader walks one epoch at a time; use persistent_workers=False, "
                "or a second loader"
            )
        try:
            loaded = self._load()
        except StopIteration:
            self._progress.finished = True
            self.close()
            raise
        except Exception:
            # torch has dropped the batch that failed; whoever goes on gets the one after it. It is
            # not counted as consumed, so a checkpoint written now leads back to it.
            self._number += 1
            raise
        self._publication.publish(self._share(self._number))
        self._progress.consumed = self._schedule.consumed(self._number)
        self._number += 1
        return loaded

    def _load(self) -> Any:
        if not self._preserve_rngs:
            return next(self._batches)
        with preserve_global_rngs():
            return next(self._batches)

    def _share(self, number: int) -> BatchShare:
        share = self._full_share
        if share is None or number + 1 == len(self._schedule.plan):  # only the last one can be smaller
            share = self._full_share = self._schedule.share(number)
        return share

    def close(self) -> None:
        """End here: take the share back, let go of the workers. Local; may be called twice."""
        self._publication.close()
        self._batches = iter(())
        self._shared_workers = None

    def __del__(self) -> None:
        if hasattr(self, "_publication"):  # __init__ got that far
            self._publication.close()
