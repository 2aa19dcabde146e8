"""Compression of gradients for communication."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """Interface of compressors, which scripts may subclass."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the compressed tensor, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the decompressed tensor."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """No compression."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor."""
        return tensor


class FP16Compressor(Compressor):
    """Compresses floating-point tensors to float16; leaves others alone."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor as float16, and its dtype."""
        is_float = tensor.dtype.is_floating_point
        return tensor.to(torch.float16) if is_float else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the tensor in its original dtype."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The available compressors.

    Attributes:
        none: no compression.
        fp16: floating-point tensors as float16.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
