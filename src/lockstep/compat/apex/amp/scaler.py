"""Loss scales, with Apex's schedule: initially 2**16, halved at an overflow, doubled after 2000 steps without."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.torch_private.tensors import amp_unscale_

__all__ = ["LossScaler"]


class LossScaler:
    """The scale of one loss, and whether its last gradients overflowed.

    Args:
        loss_scale: a fixed scale, with which no step is skipped, or "dynamic".
        init_scale: initial scale, if dynamic.
        scale_factor: factor by which it shrinks at an overflow and grows after a window without.
        scale_window: number of steps without overflow before it grows.
        min_loss_scale: the smallest scale; None for no limit.
        max_loss_scale: the largest scale.

    Attributes:
        dynamic: whether the scale changes.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._loss_scale = min(max_loss_scale, init_scale) if self.dynamic else float(loss_scale)
        self._scale_factor = scale_factor
        self._scale_seq_len = scale_window
        self._min_loss_scale = min_loss_scale
        self._max_loss_scale = max_loss_scale
        self._unskipped = 0
        self._has_overflow = False  # Apex's name, which scripts read
        # A flag per device, so that `update_scale` synchronizes once.
        self._overflow_flags: dict[torch.device, Tensor] = {}

    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by."""
        return self._loss_scale

    def clear_overflow_state(self) -> None:
        """Clear the overflow flags."""
        self._overflow_flags.clear()
        self._has_overflow = False

    def unscale(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Divide gradients by the scale, and note whether any is not finite.

        Args:
            gradients: any shapes and devices, dense.

        Returns:
            The same tensors, divided in place, if they have 32 bits or more; new float32 tensors for 16-bit ones.
        """
        wide = [each.float() if each.element_size() < 4 else each for each in gradients]
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in wide:
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, _), tensors in by_kind.items():
            flag = self._overflow_flags.setdefault(device, torch.zeros(1, dtype=torch.float32, device=device))
            inverse = torch.full((1,), 1.0 / self._loss_scale, dtype=torch.float32, device=device)
            amp_unscale_(tensors, flag, inverse)
        return wide

    def update_scale(self) -> bool:
        """Update the scale after the gradients of a loss. Returns whether to skip the step."""
        overflowed = self.dynamic and any(bool(flag.item()) for flag in self._overflow_flags.values())
        self._has_overflow = overflowed
        if overflowed:
            self._loss_scale /= self._scale_factor
            if self._min_loss_scale:
                self._loss_scale = max(self._min_loss_scale, self._loss_scale)
            self._unskipped = 0
        else:
            self._unskipped += 1
        if self._unskipped == self._scale_seq_len and self.dynamic:
            self._loss_scale = min(self._max_loss_scale, self._loss_scale * self._scale_factor)
            self._unskipped = 0
        return overflowed
