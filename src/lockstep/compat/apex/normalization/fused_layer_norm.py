"""Apex's fused normalization: torch's layers, which are fused too.

[Note: dtypes that mix] Apex's kernels normalize in float32, round to the dtype of the weights, and scale in that dtype.
torch rounds once, after scaling, to the dtype of the inputs. Hugging Face's T5 uses `FusedRMSNorm`, if it exists,
instead of its own layer, which computes as Apex does; it passes float32 to 16-bit weights and relies on a 16-bit
output. So RMSNorm equals Apex's bit for bit wherever there are 16 bits, and LayerNorm if dtypes differ. LayerNorm
with float32 weights, as at opt level O1, uses torch's kernel: there is no intermediate rounding.

As in Apex, the layers can be compiled by `torch.jit.script`, which does not support `super()`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.element_size() < 4


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if _is_narrow(tensor) else tensor


class FusedLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`. If inputs and weights have different dtypes, the output has that of the weights.

    Args:
        normalized_shape: the last dimensions of the input.
        eps: added to the variance.
        elementwise_affine: whether to learn a scale and a shift.
        memory_efficient: ignored. In Apex, the output is kept for the backward pass instead of the input; values are
            the same. To save memory, use `torch.utils.checkpoint`.
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize `input`. See [Note: dtypes that mix]."""
        weight = self.weight
        if not self.elementwise_affine:
            return functional.layer_norm(input, self.normalized_shape, None, None, self.eps)
        if input.dtype == weight.dtype or not (_is_narrow(input) or _is_narrow(weight)):
            return functional.layer_norm(input, self.normalized_shape, weight, self.bias, self.eps)
        if not _is_narrow(weight):
            return functional.layer_norm(input.to(weight.dtype), self.normalized_shape, weight, self.bias, self.eps)
        result = functional.layer_norm(_widened(input), self.normalized_shape, None, None, self.eps)
        return result.to(weight.dtype) * weight + self.bias


class FusedRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, rounded as in Apex; arguments and dtype of the output as for `FusedLayerNorm`."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize `x`. See [Note: dtypes that mix]."""
        weight = self.weight
        if not self.elementwise_affine:
            return functional.rms_norm(x, self.normalized_shape, None, self.eps)
        if not (_is_narrow(x) or _is_narrow(weight)):
            return functional.rms_norm(x, self.normalized_shape, weight, self.eps)
        return functional.rms_norm(_widened(x), self.normalized_shape, None, self.eps).to(weight.dtype) * weight


class MixedFusedLayerNorm(FusedLayerNorm):
    """`FusedLayerNorm`, whose output always has the dtype of its parameters."""


class MixedFusedRMSNorm(FusedRMSNorm):
    """`FusedRMSNorm`, whose output always has the dtype of its parameters."""
