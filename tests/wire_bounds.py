"""What `lockstep.comm.wire` promises of the error of one encoding, in numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.comm.wire import _padded

__all__ = ["error_bound"]


def error_bound(wire: str, values: torch.Tensor) -> torch.Tensor:
    """The largest error that one encoding may make in each value.

    Args:
        wire: name of a wire format.
        values: finite, float32, shape (n,).

    Returns:
        float64, shape (n,).
    """
    wide = values.double()
    if wire == "fp32":
        return torch.zeros_like(wide)
    if wire == "bf16":
        return wide.abs().mul(2.0**-8).clamp_(min=2.0**-134)
    largest = _per_block(wide.abs(), lambda block: block.amax(dim=1))
    if wire == "fp16":
        return wide.abs() * 2.0**-11 + largest * 2.0**-29 + 2.0**-134
    spread = _per_block(wide, lambda block: block.amax(dim=1) - block.amin(dim=1))
    return (spread / 509 + largest * 2.0**-22).clamp_(min=2.0**-126)


def _per_block(values: torch.Tensor, measure: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """One number for each block, repeated for each of its values."""
    blocks = _padded(values)
    return measure(blocks).repeat_interleave(blocks.shape[1])[: values.numel()] if values.numel() else values.clone()
