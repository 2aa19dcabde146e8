"""Compression: which tensor travels in place of a gradient."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """Interface: turns a tensor into what travels, and back. Scripts may bring their own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What travels, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor again."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """The tensor itself."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors as float16; others as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor as float16, and its dtype."""
        is_float = tensor.dtype.is_floating_point
        return tensor.to(torch.float16) if is_float else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor in its own dtype."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The compressors there are.

    Attributes:
        none: the tensor itself.
        fp16: floating-point tensors as float16.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
