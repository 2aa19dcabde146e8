"""Apex's fused normalization: torch's own, which is fused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.errors import InputError

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]


def _check(name: str, memory_efficient: bool) -> None:
    if memory_efficient:
        raise InputError(f"{name}(memory_efficient=True) is not supported: wrap it in torch.utils.checkpoint instead")


class FusedLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`.

    Args:
        normalized_shape: the last dimensions of the input.
        eps: added to the variance.
        elementwise_affine: whether to learn a scale and a shift.
        memory_efficient: must be False.
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        _check("FusedLayerNorm", memory_efficient)
        super().__init__(normalized_shape, eps, elementwise_affine)


class FusedRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`; arguments as for `FusedLayerNorm`."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        _check("FusedRMSNorm", memory_efficient)
        super().__init__(normalized_shape, eps, elementwise_affine)


class MixedFusedLayerNorm(FusedLayerNorm):
    """`FusedLayerNorm` whose output has the dtype of its parameters."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize `input`."""
        return super().forward(input).to(self.weight.dtype)


class MixedFusedRMSNorm(FusedRMSNorm):
    """`FusedRMSNorm` whose output has the dtype of its parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize `x`."""
        return super().forward(x).to(self.weight.dtype)
