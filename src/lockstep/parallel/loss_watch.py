"""Inspects the loss of an engine's first steps when `backward` is called, and warns if ranks do not average it right.

[Note: before the backward pass] A backward pass frees what the nodes of the loss have saved before it comes to the
model's outputs, so the checks need the loss when `backward` is called. For those few steps this module sets Python's
profiling hook of this thread, if nobody else uses it. Python calls the hook for each call of a Python function; the
hook removes itself at the first `backward`, or after so many calls that none seems to come. *Rejected:* replacing
`Tensor.backward` for the whole program; a hook on tensors, which comes too late.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType

from torch import Tensor
from torch.autograd.graph import Node

from lockstep import batch
from lockstep.comm.callsite import is_users
from lockstep.parallel.bypasses import warn_of_bypass, warn_of_collective
from lockstep.parallel.feeding import Feed
from lockstep.parallel.loss_kinds import warn_of_other_divisor

__all__ = ["LossWatch"]

# The functions through which every backward pass goes, and what they call the losses.
_ROOTS = {("backward", "_tensor.py"): "self", ("backward", "__init__.py"): "tensors"}
# Of Python functions, between a forward pass and its backward pass.
_MAX_CALLS = 20_000
# Losses of an engine that are inspected: for their divisor, and for bypasses where ranks do not divide the batch.
_LOOKS, _UNEVEN_LOOKS = 3, 3

Check = Callable[[Tensor, str], None]


class LossWatch:
    """Counts how many losses of one engine are still to be inspected, and has them inspected.

    Args:
        own: `id` of the parameters that the engine averages.
        is_on: whether this rank inspects any.
    """

    def __init__(self, own: frozenset[int], is_on: bool) -> None:
        self._own = own
        self._constants: dict[str, float] = {}
        self._looks_left, self._uneven_looks_left = (_LOOKS, _UNEVEN_LOOKS) if is_on else (0, 0)

    def forward_ends(self, feed: Feed, roots: Collection[Node]) -> None:
        """A forward pass ends, in training, whose backward pass will average. Local.

        Args:
            feed: what went through.
            roots: the nodes of its outputs.
        """
        if sys.getprofile() is not None:  # such as ours, of an earlier forward pass of this loss
            return
        checks: list[Check] = []
        if self._looks_left:
            self._looks_left -= 1
            checks.append(self._warn_of_divisor)
        if self._uneven_looks_left and feed.is_uneven:
            self._uneven_looks_left -= 1
            checks.append(lambda loss, line: warn_of_bypass(loss, roots, self._own, line))
            checks.append(warn_of_collective)
        if checks:
            sys.setprofile(_BackwardHook(checks))

    def _warn_of_divisor(self, loss: Tensor, line: str) -> None:
        warn_of_other_divisor(loss, _samples_behind(loss), line, self._constants)


class _BackwardHook:
    """A profiling hook that waits for a backward pass. See [Note: before the backward pass].

    Args:
        checks: are called with the loss, and the user's line.
    """

    def __init__(self, checks: Collection[Check]) -> None:
        self._checks = checks
        self._calls_left = _MAX_CALLS

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        self._calls_left -= 1
        code = frame.f_code
        name = _ROOTS.get((code.co_name, code.co_filename.rpartition("/")[2])) if code.co_name == "backward" else None
        if self._calls_left and (name is None or "/torch/" not in code.co_filename):
            return
        sys.setprofile(None)
        if name is None:
            return
        value = frame.f_locals.get(name)
        for loss in (value,) if isinstance(value, Tensor) else tuple(value or ()):
            if isinstance(loss, Tensor) and loss.dim() == 0:
                for check in self._checks:
                    check(loss, _users_line(frame))


def _samples_behind(loss: Tensor) -> int | None:
    """How many samples of this rank a loss is of; None where nobody knows, or its forward passes had different ones."""
    shares = [forward.feed.share for forward in batch.find_marks(loss)]
    samples = {None if share is None else share.local_samples for share in shares}
    return samples.pop() if len(samples) == 1 else None


def _users_line(frame: FrameType | None) -> str:
    while frame is not None and not is_users(frame.f_code):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
