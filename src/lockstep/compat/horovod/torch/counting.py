"""Shared by both distributed optimizers: counts backward passes until a gradient is complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.hooks import RemovableHandle

__all__ = ["CountingOptimizer", "Counts"]

_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)
_ZERO_GRAD_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)


@dataclass
class Counts:
    """The counters of the parameters' hooks, which must not keep the optimizer alive.

    Attributes:
        delays: number of backward passes until the gradient is complete, per parameter.
        num_open: number of gradients computed and not yet reduced.
        is_active: whether there are other ranks to reduce with.
        holds_back: see [Note: held back] in `gradients.py`.
        arrive: called for each complete gradient that is held back, once there are buckets.
    """

    delays: list[int]
    num_open: int = 0
    is_active: bool = False
    holds_back: bool = False
    arrive: Callable[[int], None] | None = None

    def count(self, index: int) -> int:
        """Count a backward pass of a parameter; returns how many remain until its gradient is complete."""
        left = self.delays[index] - 1
        if left < 0:
            raise AssertionError(_TOO_MANY_PASSES)
        self.delays[index] = left
        self.num_open += 1
        return left

    def reset(self, passes: int) -> None:
        """Reset the counters, after a step."""
        self.num_open = 0
        self.delays[:] = [passes] * len(self.delays)


class CountingOptimizer:
    """Base of the classes that a distributed optimizer adds to the wrapped optimizer's class.

    Attributes:
        backward_passes_per_step: number of backward passes before each step.
    """

    _counts: Counts
    backward_passes_per_step: int

    def _remove_at_end(self, hooks: Sequence[RemovableHandle]) -> None:
        """Remove hooks when this optimizer is freed, because parameters may outlive it."""
        weakref.finalize(self, _remove_all, hooks).atexit = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before each step. Local."""
        self.backward_passes_per_step = passes
        self._counts.delays[:] = [passes] * len(self._counts.delays)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Calls the wrapped optimizer's `zero_grad`.

        Raises:
            AssertionError: gradients were computed and not yet reduced.
        """
        if self._counts.num_open:
            raise AssertionError(_ZERO_GRAD_TOO_EARLY)
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]


def _remove_all(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
