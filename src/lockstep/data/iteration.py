"""One pass over an epoch on one rank: the batch in use, and how much of the epoch has been consumed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.batch.hand import Iteration
from lockstep.batch.share import BatchShare
from lockstep.batch.tags import purge
from lockstep.data.checks import is_fixed
from lockstep.data.order import Fetch, RankBatches
from lockstep.drift.watch import EvaluationWatch
from lockstep.errors import DataError

__all__ = ["EpochIterator", "EpochProgress", "RankBatchSampler"]

_count = itertools.count(1).__next__
_FEW_TAGS = 16


@dataclass
class EpochProgress:
    """The progress of one iteration, from which the loader's state is made.

    Attributes:
        epoch: the epoch iterated over.
        consumed: global samples in the epoch's batches yielded so far. Batches that workers have fetched ahead do not
            count.
        order_mark: a number for the order of the epoch, or for its batches so far, by which a resumed epoch is
            recognised; 0 if the loader makes the order itself.
        finished: whether the epoch was iterated to its end.
        is_open: whether it can continue: neither finished nor dropped.
        active: when it last began, yielded or ended, as a number that grows over all iterations of the process.
    """

    epoch: int
    consumed: int
    order_mark: int = 0
    finished: bool = False
    is_open: bool = True
    active: int = field(default_factory=_count)

    def touch(self) -> None:
        """Mark this iteration as the last active one."""
        self.active = _count()


class RankBatchSampler:
    """The `batch_sampler` that torch's loader sees: the schedule of the newest iteration.

    torch iterates over it anew in each iteration, also with persistent worker processes, and by then the loader has set
    the schedule here. The attributes are those of torch's `BatchSampler`, which programs read and use to set the epoch:
    `loader.batch_sampler.sampler.set_epoch(1)`.
    """

    def __init__(self, *, sampler: Any, batch_size: int, drop_last: bool) -> None:
        self.schedule: RankBatches | None = None
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._is_made = True

    def __setattr__(self, name: str, value: object) -> None:
        if name != "schedule" and "_is_made" in vars(self):
            raise is_fixed(f"batch_sampler.{name}", name, value)
        super().__setattr__(name, value)

    def _current(self) -> RankBatches:
        if self.schedule is None:
            raise DataError(
                "loader.batch_sampler has this rank's batches of the current epoch, and no epoch has begun. Iterate "
                "the loader itself"
            )
        return self.schedule

    def __iter__(self) -> Iterator[Fetch]:
        return iter(self._current())

    def __len__(self) -> int:
        return len(self._current())


class EpochIterator(Iterator[Any]):
    """Yields this rank's batches of one epoch and tags each with its share.

    Dropping it halfway (`break`) or calling `close` stops workers that do not persist.

    Args:
        batches: an iterator over the collated batches of `schedule`.
        shared_workers: the sampler of the worker pool that this iteration shares with later ones of its loader; None if
            it has its own workers, or none.
        has_workers: whether worker processes fetch the batches.
        evaluations: notified after the last batch of an evaluation.

    Attributes:
        waited_s: seconds that the loop has waited for batches, including for the end of the iteration.
        first_wait_s: the part of `waited_s` for the first batch.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        schedule: RankBatches,
        progress: EpochProgress,
        number: int,
        *,
        shared_workers: RankBatchSampler | None,
        has_workers: bool,
        evaluations: EvaluationWatch,
    ) -> None:
        self._batches = batches
        self._schedule = schedule
        self._progress = progress
        self._iteration = Iteration(number)
        self._shared_workers = shared_workers
        self._has_workers = has_workers
        self._evaluations = evaluations
        self._number = 0  # of the next batch
        self._num_samples = 0  # yielded on this rank
        self.waited_s = self.first_wait_s = 0.0

    @property
    def share(self) -> BatchShare | None:
        """This rank's share of the batch yielded last; None before the first."""
        return self._iteration.latest

    def __len__(self) -> int:
        """Number of batches that this iteration yields on this rank, from its first one."""
        return len(self._schedule)

    def __next__(self) -> Any:
        if self._shared_workers is not None and self._shared_workers.schedule is not self._schedule:
            raise DataError(
                f"this iteration of epoch {self._progress.epoch} has ended: a newer one took over its worker "
                "processes. With persistent_workers=True a loader runs one epoch at a time. Use "
                "persistent_workers=False, or a second loader"
            )
        purge(at_most=_FEW_TAGS)  # before the next batch is made: [Note: holes] in `batch/tags.py`
        since = time.perf_counter()
        try:
            loaded = next(self._batches)
        except StopIteration:
            if self.share is not None and (self._schedule.evaluation or not torch.is_grad_enabled()):
                self._evaluations.end(self._num_samples, self._progress.consumed, self.share.world_size)
            self._progress.finished = True
            self._progress.touch()
            self.close()
            raise
        except BaseException as error:
            # torch has dropped the failed batch, and continuing gives the one after it. It is not
            # counted as consumed, so a checkpoint written now resumes with it.
            if not self._is_still_to_come(error):
                self._number += 1
            raise
        finally:
            self.waited_s += time.perf_counter() - since
            self.first_wait_s = self.first_wait_s or self.waited_s
        share, consumed, order_mark = self._schedule.take(self._number)
        self._iteration.publish(share, loaded)
        self._progress.consumed, self._progress.order_mark = consumed, order_mark
        self._progress.touch()
        self._number += 1
        self._num_samples += share.local_samples
        return loaded

    def close(self) -> None:
        """End the iteration and release its workers. Local; may be called twice."""
        self._iteration.close()
        self._progress.is_open = False
        self._batches = iter(())
        self._shared_workers = None

    def _is_still_to_come(self, error: BaseException) -> bool:
        """Whether the batch being waited for when `error` was raised can still be fetched by the next call."""
        # After a timeout, torch keeps waiting for the batch.
        is_timeout = isinstance(error, RuntimeError) and str(error).startswith("DataLoader timed out")
        return self._has_workers and (is_timeout or not isinstance(error, Exception))

    def __del__(self) -> None:
        if hasattr(self, "_iteration"):  # __init__ got that far
            self.close()
