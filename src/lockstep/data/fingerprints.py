"""A number for the data of a loader, by which ranks notice that theirs differ.

Each rank takes its part of every batch, so all need the same samples in the same order. A `random_split` or a
`random.shuffle` after `lockstep.init` breaks that, and so does a folder that two hosts list in different orders. The
number travels with the gradients (`parallel/rank_agreement.py`).

It covers some indices of a `Subset`, some values of a `TensorDataset`, tensor or array, and some of the order. The
attributes of a user's own class are left out, as each rank may fill a cache by itself. Of floating-point numbers, only
sign and magnitude count: features that each rank computed by itself may differ in the last bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from lockstep.data.order import Order

__all__ = ["fingerprint_of_data", "fingerprint_of_order"]

_SAMPLES = 64
_BITS = 48
_OFF_ROUND_NUMBERS = 1.37


def fingerprint_of_data(dataset: Any) -> int:
    """A number below 2**48 for the data; for a dataset of the user's own class, its class."""
    return _hash(_described(dataset))


def fingerprint_of_order(order: Order, seed: int) -> int:
    """A number below 2**48 for the order of an epoch."""
    length = len(order)
    chosen = (int(order[position : position + 1][0]) for position in _positions(length))
    return _hash([str((seed, length)), str(length), *map(str, chosen)])


def _hash(parts: Sequence[str] | Iterator[str]) -> int:
    state = hashlib.blake2b(digest_size=_BITS // 8)
    for part in parts:
        state.update(part.encode(errors="replace") + b"\0")
    return int.from_bytes(state.digest(), "big")


def _described(dataset: Any) -> Iterator[str]:
    kind = type(dataset)
    yield kind.__qualname__
    if isinstance(dataset, Subset):
        yield from _indices(dataset.indices)
        yield from _described(dataset.dataset)
    elif isinstance(dataset, ConcatDataset | StackDataset):
        parts = dataset.datasets
        for part in parts.values() if isinstance(parts, dict) else parts:
            yield from _described(part)
    elif kind is TensorDataset:
        for tensor in dataset.tensors:
            yield from _numbers(tensor)
    elif isinstance(dataset, torch.Tensor | np.ndarray):
        yield from _numbers(dataset)


def _positions(length: int) -> list[int]:
    """Some positions in a sequence, the first and the last among them."""
    return sorted({position * (length - 1) // (_SAMPLES - 1) for position in range(_SAMPLES)}) if length else []


def _indices(indices: Any) -> Iterator[str]:
    try:
        length = len(indices)
        yield str(length)
        yield from (str(int(indices[position])) for position in _positions(length))
    except (TypeError, ValueError, KeyError, IndexError):  # what torch can index by, this cannot describe
        yield type(indices).__qualname__


def _numbers(array: Any) -> Iterator[str]:
    yield f"{array.dtype} {tuple(array.shape)}"
    is_on_host = not isinstance(array, torch.Tensor) or (array.device.type == "cpu" and array.layout is torch.strided)
    if is_on_host and array.ndim and len(array):
        # What would have to be copied to be flat is told by its shape alone.
        is_dense = array.is_contiguous() if isinstance(array, torch.Tensor) else array.flags.c_contiguous
        flat = array.reshape(-1) if is_dense else array
        if flat.ndim == 1:
            yield from (
                _roughly(flat[position].item()) for position in _positions(len(flat)) if hasattr(flat[position], "item")
            )


def _roughly(number: object) -> str:
    """A number, of a float its sign and magnitude."""
    if not isinstance(number, float):
        return str(number)
    # Steps of a factor of two, with no round number at an edge.
    mantissa, exponent = math.frexp(number * _OFF_ROUND_NUMBERS)
    return f"{math.copysign(1, mantissa)} {exponent}" if mantissa else "0"
