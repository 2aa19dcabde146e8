"""Samples and values in a form that two runs can compare: a key for each sample, a short sketch for each tensor.

[Note: samples by content] A sample is identified by content, not by index: two runs with different loaders yield the
same samples in different places. Its key is a hash of its rows in all tensors and texts of the batch. A second key
ignores padding at the ends of a row, so that a sample is recognised if it was padded to another length or size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.parallel.sharded.gradients import ShardedGradient
from lockstep.tree import tensors_in

__all__ = [
    "PADDING",
    "brief",
    "by_place",
    "is_time_first",
    "joins",
    "row_sketch",
    "sample_keys",
    "samples_first",
    "value_sample",
    "whole",
]

# Numbers kept per row, and per tensor, evenly spaced.
_ROW_VALUES = 13
_MOST_VALUES = 2048
# Values converted to float64 at once: copies of whole tensors would take most of a verification's time.
_VALUES_AT_ONCE = 1 << 18
# Zeros, and targets that losses ignore by default.
PADDING = (0, -100)
# Longer rows get no second key.
_LONGEST_PADDED = 1 << 22


Array = np.ndarray[Any, Any]


def _digest(parts: Iterable[bytes]) -> int:
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(part)
    return int.from_bytes(state.digest(), "big", signed=True)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, detached. Collective if each rank holds a part of it."""
    tensor = tensor.whole() if isinstance(tensor, ShardedGradient) else tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _array(tensor: Tensor) -> Array:
    """A tensor's values as a numpy array, without operators that would be recorded."""
    tensor = whole(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested:
        tensor = tensor.to_padded_tensor(0.0) if tensor.is_nested else tensor.to_dense()
    tensor = tensor.cpu()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    # A copy: numpy() fixes the size of its tensor's storage for good, and FSDP resizes those of parameters.
    return np.ascontiguousarray(tensor.resolve_conj().resolve_neg().clone().numpy())


def _bytes_of(row: Array) -> bytes:
    return f"{row.dtype}{row.shape}".encode() + row.tobytes()


def _unpadded(row: Array, padding: Sequence[int]) -> bytes:
    """A row's bytes without its shape, and without padding at the ends of dimensions; a constant mask is one number."""
    if not 1 < row.size <= _LONGEST_PADDED:
        return _bytes_of(row.reshape(-1))
    counts = row != row.flat[-1] if row.dtype == bool else ~np.isin(row, (*PADDING, *padding))
    for axis in range(row.ndim):
        others = np.flatnonzero(counts.any(tuple({*range(row.ndim)} - {axis})))
        row = row.take(range(int(others[-1]) + 1 if len(others) else 1), axis)
    flat = row.reshape(-1)
    return _bytes_of(flat[:1] if row.dtype == bool and (flat == flat[0]).all() else flat)


def _length(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.size(0) if value.ndim else None
    return len(value) if isinstance(value, list | tuple) else None


def _columns(value: Any, count: int, in_lists: bool = False) -> list[Any]:
    """The parts of a batch with an entry for each of `count` samples: tensors, and lists of anything.

    A list of `count` tensors of length `count` is ambiguous: its items are samples if other parts are `in_lists`.
    """
    if isinstance(value, Tensor):
        return [_array(value)] if _length(value) == count else []
    if _is_list_of(value, count) and (in_lists or _says_so(value, count)):
        return [list(value)]
    if isinstance(value, Mapping | list | tuple):
        parts, in_lists = _parts(value, count)
        return [column for part in parts for column in _columns(part, count, in_lists)]
    return [_array(tensor) for tensor in tensors_in(value) if _length(tensor) == count]


def joins(value: Any, count: int, in_lists: bool = False) -> bool:
    """Whether rows of a batch are parts of samples, such as nodes of graphs, outside lists with an entry per sample."""
    if not isinstance(value, Mapping | list | tuple):
        return any((_length(tensor) or 0) > count for tensor in tensors_in(value))
    if _is_list_of(value, count) and (in_lists or _says_so(value, count)):
        return False
    parts, in_lists = _parts(value, count)
    return any(joins(part, count, in_lists) for part in parts)


def _parts(value: Any, count: int) -> tuple[list[Any], bool]:
    """The parts of a batch, and whether one of them is certainly a list with an entry per sample."""
    parts = list(value.values() if isinstance(value, Mapping) else value)
    return parts, any(_is_list_of(part, count) and _says_so(part, count) for part in parts)


def _is_list_of(value: Any, count: int) -> bool:
    """Whether a list may hold `count` samples: these have one type, unlike parts of a batch (nodes, edges, labels)."""
    if not isinstance(value, list | tuple) or len(value) != count:
        return False
    return len({(type(one), one.dtype, one.ndim) if isinstance(one, Tensor) else type(one) for one in value}) == 1


def _says_so(value: Any, count: int) -> bool:
    return not all(_length(one) == count for one in value)


def is_time_first(batch: Any, count: int, squares: bool | None = None) -> bool | None:
    """Whether the `count` samples of a batch are columns of its tensors, as for recurrent networks.

    `squares` is the answer if the first tensor is as long as wide, which leaves it open.
    """
    shapes = [tuple(tensor.shape[:2]) for tensor in tensors_in(batch) if tensor.ndim]
    if not shapes or shapes[0][1:] != (count,) or not all(count in each for each in shapes):
        return False
    return squares if shapes[0][0] == count else True


def samples_first(tensors: Iterable[Tensor], count: int) -> list[Tensor]:
    """Tensors for which `is_time_first` holds, with samples as rows."""
    return [each.transpose(0, 1) if each.ndim > 1 and each.size(1) == count else each for each in tensors]


def sample_keys(batch: Any, count: int | None = None, padding: Sequence[int] = ()) -> list[tuple[int, int]]:
    """A key for each sample of a batch, and one without padding. See [Note: samples by content].

    Args:
        batch: a batch from a loader, or the input of a module. If its samples cannot be separated, it gets one pair.
        count: number of its samples if known; else the length of a list of dicts, or of its first tensor.
        padding: numbers that samples may be padded with, besides 0 and -100.
    """
    first = next((tensor.size(0) for tensor in tensors_in(batch) if tensor.ndim), None)
    is_list = isinstance(batch, list) and all(isinstance(each, Mapping) for each in batch)
    for number in (count, len(batch) if is_list else None, first):
        columns = _columns(batch, number) if number else []
        if number and columns:
            return [_key_of([column[row] for column in columns], padding) for row in range(number)]
    return [_key_of([batch], padding)]


def _key_of(parts: Sequence[Any], padding: Sequence[int]) -> tuple[int, int]:
    """The key of any object, from its tensors and numbers, or its text if it has none."""
    exact, unpadded = [], []
    for part in parts:
        if isinstance(part, np.ndarray | np.generic):
            arrays = [np.asarray(part)]
        else:
            arrays = [_array(tensor) for tensor in tensors_in(part)]
        exact += list(map(_bytes_of, arrays)) or [repr(part).encode()]
        unpadded += [_unpadded(each, padding) for each in arrays] or [repr(part).encode()]
    return _digest(exact), _digest(unpadded)


def row_sketch(tensor: Tensor, count: int, across: bool = False) -> Tensor | None:
    """Some numbers of each of `count` samples, float64: values at fixed places, then mean, root mean square, maximum.

    None if the tensor's rows are not a multiple of `count`. Several rows of a sample are next to each other, or
    `count` apart if `across`, as in joined views.
    """
    if not tensor.ndim or not count or not tensor.numel() or tensor.size(0) % count:
        return None
    rows = _array(tensor)
    if across:
        rows = rows.reshape(-1, count, rows[0].size).swapaxes(0, 1)
    rows = rows.reshape(count, -1)
    at_once = max(1, _VALUES_AT_ONCE // rows.shape[1])
    return torch.cat([_sketch(rows[first : first + at_once]) for first in range(0, count, at_once)])


def _sketch(rows: Array) -> Tensor:
    rows = _real(rows)
    width = rows.shape[1]
    places = np.linspace(0, width - 1, min(width, _ROW_VALUES)).round().astype(int)
    with np.errstate(all="ignore"):
        squares = np.einsum("ij,ij->i", rows, rows)
        whole = [rows.mean(1), np.sqrt(squares / width), np.maximum(rows.max(1), -rows.min(1))]
    return torch.from_numpy(np.concatenate([rows[:, places], np.stack(whole, 1)], 1))


def value_sample(tensor: Tensor, in_order: bool = False) -> Tensor:
    """Some numbers of a parameter, gradient or state, float64: values at fixed places, then the norm.

    With `in_order` they are sorted first, for buffers such as queues, which ranks fill in another order.
    """
    flat = _real(_array(tensor).reshape(-1))
    flat = np.sort(flat) if in_order else flat
    step = max(1, -(-flat.size // _MOST_VALUES))
    with np.errstate(all="ignore"):
        norm = np.sqrt(np.einsum("i,i", flat, flat))
    return torch.from_numpy(np.append(flat[::step], norm))


def brief(tensors: Iterable[Tensor]) -> Tensor:
    """Two numbers per tensor, float64: the sum of its `value_sample`, and its norm; shape (2 * tensors,)."""
    numbers = [number for each in map(value_sample, tensors) for number in (each.sum(), each[-1])]
    return torch.stack(numbers) if numbers else torch.zeros(0)


def by_place(tensors: Iterable[Tensor]) -> Tensor:
    """One number per tensor, float64, which depends on the places of its values, too; shape (tensors,)."""
    samples = map(value_sample, tensors)
    numbers = [each @ torch.linspace(1, 2, len(each), dtype=each.dtype, device=each.device) for each in samples]
    return torch.stack(numbers) if numbers else torch.zeros(0)


def _real(array: Array) -> Array:
    """As float64; a complex number becomes two."""
    if np.iscomplexobj(array):
        array = np.stack([array.real, array.imag], -1).reshape(*array.shape[:-1], -1)
    return array.astype(np.float64)
