"""A number for what a loader takes its batches from, by which the ranks notice that they do not hold the same.

Each rank takes its part of every batch, so all need the same samples in the same order. A `random_split` or a
`random.shuffle` of a list of files after `lockstep.init`, which gives each rank random numbers of its own, breaks that,
and so does a folder that two hosts list in different orders. The number travels with the gradients
(`parallel/claims.py`).

What is looked at is a sample of indices, of tensors, and of what a dataset keeps for each sample
([Note: columns that tell] in `columns.py`): enough to tell two orders apart, little enough for datasets of any size.
Other attributes of a dataset are its own business: a cache, say, which a rank fills for itself. So are lists in which
not every sample has a text yet. Of floating-point numbers the sign and the magnitude count: what each rank has computed
for itself, such as features of a frozen model, may differ in the last bits.

[Note: datasets in use] Loaders are made again and again over one dataset: for each fold, for each trial of a search.
By then each rank has used it, and caches and counts of visits may look like what a dataset keeps. So of one dataset
only those attributes are looked at that told something when the first loader asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.data.columns import TellingColumn, is_table, roughly, telling_column
from lockstep.data.order import Order

__all__ = ["fingerprint_of_data", "fingerprint_of_order"]

_SAMPLES = 64
_BITS = 48
_told_at_first: Any = WeakIdKeyDictionary()  # names of attributes, by dataset; see [Note: datasets in use]


def fingerprint_of_data(dataset: Any) -> int:
    """A number below 2**48 for the data; of a class of the user's, texts or integers that it has for each sample."""
    return _hash(_described(dataset))


def fingerprint_of_order(order: Order, seed: int) -> int:
    """A number below 2**48 for the order of an epoch."""
    return _hash([str((seed, len(order))), *_indices(order)])


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
    else:
        yield from _contents_of(dataset)


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
        flat = array.reshape(-1) if array.ndim > 1 and _is_dense(array) else array
        if flat.ndim == 1:
            yield from (
                roughly(flat[position].item()) for position in _positions(len(flat)) if hasattr(flat[position], "item")
            )


def _is_dense(array: Any) -> bool:
    """Whether it can be flattened without a copy."""
    return bool(array.is_contiguous() if isinstance(array, torch.Tensor) else array.flags.c_contiguous)


def _contents_of(dataset: Any) -> Iterator[str]:
    """Of what it keeps for each of its samples, all texts; without texts, the first integers."""
    attributes = {"": dataset} if is_table(dataset) else getattr(dataset, "__dict__", {})
    try:
        length = len(dataset)
    except Exception:  # code of the user's
        return
    first = _told_at_first.get(dataset) if _may_be_noted(dataset) else None
    found = {name: _column_of(values, length) for name, values in attributes.items() if first is None or name in first}
    columns = {name: column for name, column in found.items() if column is not None}
    texts = {name: column for name, column in columns.items() if column.is_text}
    chosen = texts or dict(list(columns.items())[:1])
    if _may_be_noted(dataset):
        _told_at_first.setdefault(dataset, frozenset(chosen))
    for name, column in chosen.items():
        yield from (
            f"{name} {position} {part}" for position, part in zip(_positions(length), column.parts, strict=True)
        )


def _may_be_noted(dataset: Any) -> bool:
    return not is_table(dataset) and hasattr(dataset, "__dict__") and type(dataset).__weakrefoffset__ != 0


def _column_of(values: Any, length: int) -> TellingColumn | None:
    try:
        return telling_column(values, length, _positions(length))
    except Exception:  # code of the user's, or of another library
        return None
