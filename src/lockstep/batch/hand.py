"""Which batch a thread works on: for metrics, which see numbers, and for layers inside a model.

[Note: in hand] The batch of a forward pass is known by its tensors. A metric that is handed a loss has none to look
at. It takes the batch of the engine's forward pass, if there was one since the loader yielded last; else the batch
yielded last, unless the loop may be working on another: an earlier batch of the same iteration is still in memory, two
iterations take turns, or the number of updates is not that of the batches. Then there are several candidates, and who
cannot do without an answer asks the user. A loop that fetches ahead works on its last batches when the iteration is
over: fewer updates have come by then than there were batches. Where several forward passes have come since the loader
yielded last, on batches of which this rank holds different numbers of samples, all of them are candidates.

[Note: values without a metric] `lockstep.mean` and the like are handed values without a graph, once for each batch or
once for all, and keep no count of updates. So after an iteration such a value is of everything, unless about as many
were asked for as there were batches. And after an evaluation inside of a training loop it is of the evaluation.
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
# A loop does not fetch more batches ahead; see [Note: values without a metric].
_MOST_AHEAD = 4


class Iteration:
    """One pass of a loader over its batches, as this process sees it.

    Iterations nest: an evaluation runs inside a training loop. When the inner one ends, the batch in hand is again
    the outer one's.

    Attributes:
        number: of this iteration; see `plans.register`.
        num_batches: yielded so far.
        latest: the share of the batch yielded last; None before the first.
        num_values: how often it was asked for the batch of a value (`of_a_value`).
    """

    # Those that are not over; the one that yielded last is at the end.
    _open: list[Iteration] = []  # noqa: RUF012  # one for the process
    _closed: Iteration | None = None  # the one that was over last, if none has yielded since

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_batches = 0
        self.num_values = 0
        self.latest: BatchShare | None = None
        self._began = self._yielded = next(_counter)
        self._all: set[BatchShare] = set()
        Iteration._open.insert(0, self)

    def publish(self, share: BatchShare, batch: Any = None) -> None:
        """This batch is yielded now: tag its tensors. Local."""
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
        """The iteration is over. Local; may be called twice."""
        if self in Iteration._open:
            Iteration._open.remove(self)
            if self.latest is not None:
                self.latest = self.latest.remembered()
                Iteration._closed = self
                _forwards.clear()
        self._all.clear()
        forget(self.number)

    def candidates(self, num_updates: int | None) -> list[BatchShare]:
        """What may be in hand; see [Note: in hand].

        Args:
            num_updates: how often the asking metric was updated in this iteration before; None if it cannot tell.
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
    depth = 0  # of forward passes of engines that are under way
    held: BatchShare | None = None  # by the user's word
    active: BatchShare | None = None  # of the forward pass under way
    forward: object = None  # that forward pass, where an engine runs it


_local = _Local()
_forward: BatchShare | None = None  # of the last forward pass of an engine
# Of those since an iteration yielded or was over, by number of samples: the latest is the last.
_forwards: dict[int, BatchShare] = {}
_evaluation = (0, 0)  # see `latest_evaluation`


@contextmanager
def hold(share: BatchShare) -> Iterator[None]:
    """What goes through an engine inside, in this thread, is of this share, whatever it looks like. Local."""
    before, _local.held = _local.held, share
    try:
        yield
    finally:
        _local.held = before


def held() -> BatchShare | None:
    """The share that `hold` named for this thread."""
    return _local.held


class _Active:
    """The context of `active`. No generator: every step makes one."""

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
    """A context in which a forward pass of an engine on that share is under way in this thread. Local."""
    return _Active(share, forward)


def active_forward() -> object:
    """The engine's forward pass that is under way in this thread; None outside of all."""
    return _local.forward


def active_share(in_backward: bool) -> BatchShare | None:
    """The share of the forward pass under way, for a layer inside the model; None where nobody knows.

    Args:
        in_backward: the layer runs again in a backward pass (a checkpoint), after the forward pass of its engine.
    """
    share = _local.active or _local.held
    return _forward if share is None and in_backward else share


def note_forward(share: BatchShare | None) -> None:
    """An engine begins a forward pass on that share; None where it cannot tell. Local."""
    global _forward
    share = None if share is None else share.remembered()
    _forward = share
    if share is not None:
        _forwards.pop(share.local_samples, None)
        _forwards[share.local_samples] = share


def latest_forward() -> BatchShare | None:
    """The share of the engine's forward passes since a loader yielded last; None if several, or within one. Local."""
    return next(iter(_forwards.values())) if len(_forwards) == 1 and not _local.depth else None


def latest_iteration() -> Iteration | None:
    """The open iteration that yielded last; None outside of loaders."""
    return Iteration._open[-1] if current() is not None else None


def current() -> BatchShare | None:
    """The share of the batch that an open iteration of a loader yielded last; None outside of loaders."""
    return Iteration._open[-1].latest if Iteration._open else None


def reset() -> None:
    """Forget iterations that were left open, and the last forward pass. Local."""
    global _forward, _evaluation
    Iteration._open.clear()
    Iteration._closed = None
    _forward, _evaluation = None, (0, 0)
    _forwards.clear()


def note_evaluation(fingerprint: int, world_size: int) -> None:
    """An iteration of a loader with `evaluation=True` begins; of which data, and how many ranks share it. Local."""
    global _evaluation
    _evaluation = (fingerprint, world_size)


def latest_evaluation() -> tuple[int, int]:
    """What `note_evaluation` was told last; zeros before."""
    return _evaluation


def latest_of_each() -> list[BatchShare]:
    """The share of the batch that each open iteration yielded last, the latest at the end. Local."""
    return [each.latest for each in Iteration._open if each.latest is not None]


def since_now() -> int:
    """The number of the latest iteration before all that are under way. Local."""
    return min((each.number - 1 for each in Iteration._open), default=num_registrations())


def _left_over(num_updates: Callable[[Iteration], int]) -> list[BatchShare]:
    """Outside of all iterations: a batch of the last one, if fewer updates have come than it had batches."""
    last = Iteration._closed
    if last is None or last.latest is None or not 0 < num_updates(last) < last.num_batches:
        return []
    return [last.latest] if last.latest.local_samples == 1 else [last.latest, BatchShare(1, 1, 1)]


def in_hand(num_updates: Callable[[Iteration], int]) -> list[BatchShare]:
    """The shares of the batches that this thread may be working on; empty outside of loaders.

    Args:
        num_updates: how often the asking metric was updated in an iteration before.

    Returns:
        Shares of different numbers of local samples, most likely first; more than one where it cannot be told.
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
    """The same for a value that a function is handed, without a graph. See [Note: values without a metric]."""
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
