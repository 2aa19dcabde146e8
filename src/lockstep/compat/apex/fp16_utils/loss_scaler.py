"""Loss scales of `FP16_Optimizer`. Those of `amp`, with another schedule, are in `amp/scaler.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["DynamicLossScaler", "LossScaler"]


class LossScaler:
    """A fixed loss scale.

    Args:
        scale: the factor of the loss.

    Attributes:
        cur_scale: the scale, for reading and writing.
    """

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Always False: with a fixed scale no step is skipped."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Does nothing."""

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss."""
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        """A backward hook that scales gradients."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of the scaled loss."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class DynamicLossScaler(LossScaler):
    """A loss scale that shrinks at each overflow, but not below 1, and grows after a window without any.

    Args:
        init_scale: the initial scale.
        scale_factor: factor by which it shrinks and grows.
        scale_window: number of steps without overflow before it grows.
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient is not finite."""
        return any(not bool(torch.isfinite(each.grad).all()) for each in params if each.grad is not None)

    def update_scale(self, overflow: bool) -> None:
        """Update the scale after a step."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
