"""Gradients of passes under `no_sync()` that the script averages itself, behind the backward pass.

Sharpness-aware optimizers do so. What averages communicates between the gradients and the step, and leaves other
gradients than came. Communication alone says nothing, since scripts reduce a loss to show it; nor do other gradients:
clipping and the scales of mixed precision multiply all of them by one number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.drift.watch import communication

__all__ = ["AccumulatedGradients"]

_PARAMETERS, _VALUES = 4, 32  # that are looked at; of each
_ROUNDINGS = 4


class AccumulatedGradients:
    """Whether what has accumulated is averaged by other means. Local.

    Args:
        parameters: whose gradients they are.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters[:: -(-len(parameters) // _PARAMETERS)]
        self._values: torch.Tensor | None = None
        self._communication: object = None

    def note(self) -> None:
        """A backward pass is over whose gradients are not to be averaged."""
        self._values, self._communication = self._some_values(), communication()

    def were_averaged(self) -> bool:
        """Whether this process has communicated since, and gradients are not what has come, times one number."""
        before, now = self._values, self._some_values()
        if before is None or now is None or before.shape != now.shape or self._communication == communication():
            return False
        tolerance = _ROUNDINGS * torch.finfo(now.dtype).eps * now.abs().max()
        before, now = before.double(), now.double()
        factor = before.dot(now) / before.dot(before).clamp(min=1e-300)
        return bool((now - factor * before).abs().max() > tolerance)

    def _some_values(self) -> torch.Tensor | None:
        """Shape (values,), of the gradients' dtype; None where there is no dense one of real numbers."""
        gradients = [each.grad.detach() for each in self._parameters if each.grad is not None]
        gradients = [each for each in gradients if each.layout is torch.strided and each.is_floating_point()]
        parts = [each.reshape(-1)[:: -(-each.numel() // _VALUES)] for each in gradients if each.numel()]
        parts = [part for part in parts if (part.device, part.dtype) == (parts[0].device, parts[0].dtype)]
        return torch.cat(parts) if parts else None
