"""Samples and values in a form that two runs can compare: a number for each sample, a short sketch for each tensor.

[Note: samples by content] A sample is known by what is in it, not by an index: two runs with other loaders hand out the
same samples in other places. Its key is a hash of its rows in all tensors and texts of the batch. A second key leaves
out what repeats at the end of a row, so that a sample is known again where it was padded to another length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.tree import tensors_in

__all__ = ["row_sketch", "sample_keys", "value_sample"]

# Numbers kept of a row, and of a tensor: evenly spread over it.
_ROW_VALUES = 13
_MOST_VALUES = 2048
# Longer rows get no second key: nobody pads those.
_LONGEST_PADDED = 1 << 16


Array = np.ndarray[Any, Any]


def _digest(parts: Iterable[bytes]) -> int:
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(part)
    return int.from_bytes(state.digest(), "big", signed=True)


def _array(tensor: Tensor) -> Array:
    """Its values, as numpy has them, which no watch of operators sees."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_nested:
        tensor = tensor.to_padded_tensor(0.0) if tensor.is_nested else tensor.to_dense()
    tensor = tensor.cpu()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    return np.ascontiguousarray(tensor.resolve_conj().resolve_neg().numpy())


def _bytes_of(row: Array) -> bytes:
    return f"{row.dtype}{row.shape}".encode() + row.tobytes()


def _unpadded(row: Array) -> bytes:
    """Without what repeats at its end, and without its shape."""
    flat = row.reshape(-1)
    if not 1 < flat.size <= _LONGEST_PADDED:
        return _bytes_of(flat)
    others = np.flatnonzero(flat != flat[-1])
    return _bytes_of(flat[: int(others[-1]) + 1] if len(others) else flat[:1])


def _texts(value: Any, count: int) -> list[list[Any]]:
    """Columns of texts or numbers in a batch."""
    columns = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [
        list(one)
        for one in columns
        if isinstance(one, list | tuple) and len(one) == count and all(isinstance(each, str | int) for each in one)
    ]


def _is_list_of_samples(batch: Any, count: int, arrays: list[Array]) -> bool:
    if not isinstance(batch, list | tuple) or len(batch) != count or all(isinstance(one, Tensor) for one in batch):
        return False
    return not all(array.ndim and len(array) == count for array in arrays)


def sample_keys(batch: Any, count: int | None = None) -> list[tuple[int, int]]:
    """A key for each sample of a batch, and one without padding. See [Note: samples by content].

    Args:
        batch: what a loader yielded, or what went into a module.
        count: number of its samples where somebody knows; else the length of its first tensor.

    Returns:
        One pair for each sample; one pair for the whole where its parts cannot be told apart.
    """
    arrays = [_array(tensor) for tensor in tensors_in(batch)]
    first = next((len(array) for array in arrays if array.ndim), None)
    count = first if count is None else count
    if count is not None and _is_list_of_samples(batch, count, arrays):
        return [_key_of_all([_array(each) for each in tensors_in(sample)], sample) for sample in batch]
    columns = [array for array in arrays if array.ndim and len(array) == count]
    texts = _texts(batch, count) if count is not None else []
    if not count or not (columns or texts):
        return [_key_of_all(arrays, None if arrays else batch)]
    keys = []
    for row in range(count):
        words = [str(column[row]).encode() for column in texts]
        parts = [np.asarray(column[row]) for column in columns]
        keys.append((_digest([*map(_bytes_of, parts), *words]), _digest([*map(_unpadded, parts), *words])))
    return keys


def _key_of_all(arrays: list[Array], value: Any) -> tuple[int, int]:
    if not arrays:
        return (_digest([repr(value).encode()]),) * 2
    return _digest(map(_bytes_of, arrays)), _digest(map(_unpadded, arrays))


def row_sketch(tensor: Tensor, count: int) -> Tensor | None:
    """Some numbers of each of `count` rows, float64: values at fixed places, then mean, root mean square and maximum.

    None where the tensor is not made of that many rows.
    """
    if not tensor.ndim or not count or not tensor.numel() or tensor.size(0) % count:
        return None
    rows = _real(_array(tensor)).reshape(count, -1)
    width = rows.shape[1]
    places = np.linspace(0, width - 1, min(width, _ROW_VALUES)).round().astype(int)
    with np.errstate(all="ignore"):
        whole = np.stack([rows.mean(1), np.sqrt(np.square(rows).mean(1)), np.abs(rows).max(1)], 1)
    return torch.from_numpy(np.concatenate([rows[:, places], whole], 1))


def value_sample(tensor: Tensor) -> Tensor:
    """Some numbers of a parameter, gradient or state, float64: values at fixed places, then the norm."""
    flat = _array(tensor).reshape(-1)
    step = max(1, -(-flat.size // _MOST_VALUES))
    with np.errstate(all="ignore"):
        norm = np.sqrt(np.square(_real(flat)).sum())
    return torch.from_numpy(np.append(_real(flat[::step]), norm))


def _real(array: Array) -> Array:
    """In float64; complex numbers as two."""
    if np.iscomplexobj(array):
        array = np.stack([array.real, array.imag], -1).reshape(*array.shape[:-1], -1)
    return array.astype(np.float64)
