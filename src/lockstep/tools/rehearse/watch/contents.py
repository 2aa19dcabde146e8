"""A hash of the samples of a pass over data, which does not depend on their order.

It is the sum over samples of a hash of some of each sample's bytes. This costs little. It is unknown if samples are
all alike, too many, or not made of tensors.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from lockstep.tools.rehearse.devices.marks import mark_of
from lockstep.tree import tensors_in

__all__ = ["Contents"]

_MAX_SAMPLES = 20_000  # about a second
_MAX_BYTES = 256  # per tensor of a sample, evenly spaced
_MODULUS = 2**64


class Contents:
    """The samples of one pass, batch by batch."""

    def __init__(self) -> None:
        self._sum = self._count = 0
        self._first: int | None = None
        self._is_varied = False
        self._is_known = True

    def add(self, batch: Any, size: int) -> None:
        """Add a batch of `size` samples; a sample is one row of each tensor whose first dimension is `size`."""
        if not self._is_known or self._count + size > _MAX_SAMPLES:
            self._is_known = False
            return
        columns = [_bytes_of(each, size) for each in tensors_in(batch) if each.dim() and each.size(0) == size]
        rows = [column for column in columns if column is not None]
        self._is_known = size > 0 and len(rows) == len(columns) > 0
        for number in range(size if self._is_known else 0):
            self._add_sample(b"".join(row[number] for row in rows))

    def _add_sample(self, data: bytes) -> None:
        value = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
        self._first = value if self._first is None else self._first
        self._is_varied |= value != self._first
        self._sum = (self._sum + value) % _MODULUS
        self._count += 1

    def text(self) -> str:
        """The hash in hexadecimal; empty if unknown."""
        return f"{self._sum:x}" if self._is_known and self._is_varied else ""


def _bytes_of(tensor: torch.Tensor, size: int) -> list[bytes] | None:
    """Some bytes of each row; None if the tensor is not a plain one in host memory."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or mark_of(tensor) is not None:
        return None
    try:
        table = tensor.detach().contiguous().view(torch.uint8).reshape(size, -1).numpy()
    except RuntimeError:  # a quantized tensor, one without numbers, or a torch without NumPy
        return None
    step = -(-table.shape[1] // _MAX_BYTES) or 1
    return [row.tobytes() for row in table[:, ::step]]
