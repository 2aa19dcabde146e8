"""Which batch a thread is working on: for metrics, which see only numbers, and for layers inside a model.

[Note: in hand] A forward pass identifies its batch by its input tensors; a metric that is given a loss only sees a
number. It takes the batch of the engine's last forward pass, if there was one since the loader yielded last; else the
batch yielded last, unless the loop may be working on another: an earlier batch of the same iteration is still in
memory, two iterations alternate, or the numbers of updates and batches differ. Then there are several candidates, and
callers that need an answer raise an error. A loop that fetches ahead works on its last batches after the iteration has
ended: by then there were fewer updates than batches. If there were several forward passes since the loader yielded
last, on batches of which this rank holds different numbers of samples, all of these are candidates.

[Note: values without a metric] `lockstep.mean` and similar functions get values without a graph, once per batch or once
for all batches, and keep no count of updates. So after an iteration such a value is taken to cover all batches, unless
there were about as many values as batches. After an evaluation inside a training loop it belongs to the evaluation.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lockstep.batch.plans import note_yielded, num_registrations
from lockstep.batch.share import BatchShare
from lockstep.batch.tags import forget, shares_in_memory, tag_batch
from lockstep.torch_private.dynamo import left_out

__all__ = [
    "Iteration",
    "active",
    "active_forward",
    "active_share",
    "current",
    "held",
    "hold",
    "in_hand",
    "latest_evaluation",
    "latest_forward",
    "latest_iteration",
    "latest_of_each",
    "note_evaluation",
    "note_forward",
    "of_a_value",
    "reset",
    "since_now",
]

_counter = itertools.count(1)
_MOST_AHEAD = 4  # batches that a loop is assumed to fetch ahead; see [Note: values without a metric]


class Iteration:
    """One pass of a loader over its batches in this process.

    Iterations nest: an evaluation runs inside a training loop. When the inner one ends, the current batch is the outer
    one's again.

    Attributes:
        number: number of this iteration; see `plans.register`.
        num_batches: number of batches yielded so far.
        latest: the share of the batch yielded last; None before the first.
        num_values: number of values whose batch was looked up here (`of_a_value`).
    """

    # Running iterations; the one that yielded last is at the end.
    _open: list[Iteration] = []  # noqa: RUF012  # one for the process
    _closed: Iteration | None = None  # the one that ended last, if none has yielded since

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_batches = 0
        self.num_values = 0
        self.latest: BatchShare | None = None
        self._began = self._yielded = next(_counter)
        self._all: set[BatchShare] = set()
        Iteration._open.insert(0, self)

    def publish(self, share: BatchShare, batch: Any = None) -> None:
        """Note that this batch is being yielded, and tag its tensors. Local."""
        if self in Iteration._open:
            Iteration._open.remove(self)
        Iteration._open.append(self)
        Iteration._closed = None
        before, self.latest = self.latest, share
        if before is not None and before.local_samples != share.local_samples:
            self._all.add(before)
        note_yielded(share)
        _forwards.clear()
        self.num_batches += 1
        self._yielded = next(_counter)
        tag_batch(batch, share, self.number)

    def close(self) -> None:
        """End the iteration. Local; may be called twice."""
        if self in Iteration._open:
            Iteration._open.remove(self)
            if self.latest is not None:
                self.latest = self.latest.remembered()
                Iteration._closed = self
                _forwards.clear()
        self._all.clear()
        forget(self.number)

    def candidates(self, num_updates: int | None) -> list[BatchShare]:
        """The shares of the batches that may be in hand; see [Note: in hand].

        Args:
            num_updates: number of earlier updates of the calling metric in this iteration; None if unknown.
        """
        assert self.latest is not None
        in_memory = shares_in_memory(self.number)
        found = [self.latest, *(in_memory or ())]
        found += [
            other.latest
            for other in Iteration._open
            if other is not self and other._yielded > self._began and other.latest is not None
        ]
        if in_memory is None or num_updates != self.num_batches - 1:
            found += self._all
        return found


class _Local(threading.local):
    depth = 0  # nesting depth of running forward passes of engines
    held: BatchShare | None = None  # declared by the user
    active: BatchShare | None = None  # share of the running forward pass
    forward: object = None  # that forward pass, if an engine runs it


_local = _Local()
_forward: BatchShare | None = None  # share of an engine's last forward pass
# Shares of the forward passes since an iteration last yielded or ended, by number of samples, the latest last.
_forwards: dict[int, BatchShare] = {}
_evaluation = (0, 0)  # see `latest_evaluation`


@contextmanager
def hold(share: BatchShare) -> Iterator[None]:
    """A context in which all inputs of engines in this thread have this share, whatever their tensors say. Local."""
    before, _local.held = _local.held, share
    try:
        yield
    finally:
        _local.held = before


def held() -> BatchShare | None:
    """The share that `hold` named for this thread."""
    return _local.held


class _Active:
    """The context of `active`. A class, because a generator would be slower and every step makes one."""

    __slots__ = ("_before", "_own")

    def __init__(self, share: BatchShare | None, forward: object) -> None:
        self._own = share, forward
        self._before: tuple[BatchShare | None, object] = (None, None)

    @left_out(with_what_it_calls=True)
    def __enter__(self) -> None:
        self._before = _local.active, _local.forward
        _local.active, _local.forward = self._own
        _local.depth += 1

    @left_out(with_what_it_calls=True)
    def __exit__(self, *_: object) -> None:
        _local.active, _local.forward = self._before
        _local.depth -= 1


@left_out(with_what_it_calls=True)
def active(share: BatchShare | None, forward: object = None) -> AbstractContextManager[None]:
    """A context in which an engine runs a forward pass on that share in this thread. Local."""
    return _Active(share, forward)


def active_forward() -> object:
    """The engine's forward pass that is running in this thread, or None."""
    return _local.forward


def active_share(in_backward: bool) -> BatchShare | None:
    """The share of the running forward pass, for a layer inside the model; None if unknown.

    Args:
        in_backward: whether the layer is rerun in a backward pass (a checkpoint), after its engine's forward pass.
    """
    share = _local.active or _local.held
    return _forward if share is None and in_backward else share


def note_forward(share: BatchShare | None) -> None:
    """Note that an engine begins a forward pass on that share; None if it is unknown. Local."""
    global _forward
    share = None if share is None else share.remembered()
    _forward = share
    if share is not None:
        _forwards.pop(share.local_samples, None)
        _forwards[share.local_samples] = share


def latest_forward() -> BatchShare | None:
    """The share of the engines' forward passes since a loader last yielded; None if several, or within one. Local."""
    return next(iter(_forwards.values())) if len(_forwards) == 1 and not _local.depth else None


def latest_iteration() -> Iteration | None:
    """The running iteration that yielded last; None outside loaders."""
    return Iteration._open[-1] if current() is not None else None


def current() -> BatchShare | None:
    """The share of the batch that a running iteration yielded last; None outside loaders."""
    return Iteration._open[-1].latest if Iteration._open else None


def reset() -> None:
    """Forget unfinished iterations, and the last forward pass. Local."""
    global _forward, _evaluation
    Iteration._open.clear()
    Iteration._closed = None
    _forward, _evaluation = None, (0, 0)
    _forwards.clear()


def note_evaluation(fingerprint: int, world_size: int) -> None:
    """Note that an iteration with `evaluation=True` begins, its data, and how many ranks share them. Local."""
    global _evaluation
    _evaluation = (fingerprint, world_size)


def latest_evaluation() -> tuple[int, int]:
    """The last arguments of `note_evaluation`; zeros before the first call."""
    return _evaluation


def latest_of_each() -> list[BatchShare]:
    """The share of the batch that each running iteration yielded last, the latest at the end. Local."""
    return [each.latest for each in Iteration._open if each.latest is not None]


def since_now() -> int:
    """The number of the latest iteration that began before all running ones. Local."""
    return min((each.number - 1 for each in Iteration._open), default=num_registrations())


def _left_over(num_updates: Callable[[Iteration], int]) -> list[BatchShare]:
    """Outside all iterations: a batch of the last one, if there were fewer updates than batches in it."""
    last = Iteration._closed
    if last is None or last.latest is None or not 0 < num_updates(last) < last.num_batches:
        return []
    return [last.latest] if last.latest.local_samples == 1 else [last.latest, BatchShare(1, 1, 1)]


def in_hand(num_updates: Callable[[Iteration], int]) -> list[BatchShare]:
    """The shares of the batches that this thread may be working on; empty outside loaders.

    Args:
        num_updates: returns the number of earlier updates of the calling metric in an iteration.

    Returns:
        Shares with different numbers of local samples, most likely first; more than one if the batch is unknown.
    """
    if _local.held is not None:
        return [_local.held]
    if _forwards and _forward is not None:
        return list(reversed(_forwards.values()))
    iteration = latest_iteration()
    if iteration is None:
        return _left_over(num_updates)
    found = iteration.candidates(num_updates(iteration))
    return list({each.local_samples: each for each in reversed(found)}.values())[::-1]


def of_a_value() -> list[BatchShare]:
    """The same for a value without a graph that is passed to a function. See [Note: values without a metric]."""
    iteration = latest_iteration()
    if iteration is not None and Iteration._closed is not None and _local.held is None:
        return []
    found = in_hand(_num_values)
    if iteration is not None:
        iteration.num_values += 1
    return found


def _num_values(iteration: Iteration) -> int:
    if iteration in Iteration._open:
        return iteration.num_batches - 1  # one for each batch, or several
    return iteration.num_values if iteration.num_batches - iteration.num_values <= _MOST_AHEAD else 0
