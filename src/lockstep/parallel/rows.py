"""Number of rows in the inputs of a model.

[Note: rows] There is one rule. An argument that states its number of samples has priority (graphs, packed sequences);
otherwise the first tensor, array or list among the arguments determines it by its first dimension or length, and in a
dictionary, which has no first entry, a list or the tensor with the most dimensions. If neither is right, the script
says so: `with model.samples(n)`.

Without a Lockstep loader, ranks compare this number, and stop if it differs: arguments that are the same on every rank,
such as a list of classes, belong after the batch.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from lockstep.comm.wording import describe_tensor
from lockstep.tree import tensors_in

__all__ = ["rows_in", "show_inputs"]

_Array = np.ndarray[Any, Any]


def rows_in(inputs: Any) -> int | None:
    """The number of rows of one forward pass. See [Note: rows]. Local.

    Args:
        inputs: positional and keyword arguments of a model.

    Returns:
        None if no argument has rows.
    """
    args, kwargs = inputs
    values = (*args, *kwargs.values())
    for find in (_said_by, _rows_of):
        for value in values:
            rows = find(value)
            if rows is not None:
                return rows
    return None


def _rows_of(value: Any) -> int | None:
    found = _find(value)
    return None if found is None else found[1]


def _find(value: Any) -> tuple[float, int] | None:
    """The priority of `value` in a dictionary as an indication of rows, and its number of rows."""
    if isinstance(value, torch.Tensor):  # a nested one has no shape, and a parameter no samples
        return (value.dim(), value.size(0)) if value.dim() and not isinstance(value, torch.nn.Parameter) else None
    if isinstance(value, np.ndarray):
        return (value.ndim, value.shape[0]) if value.ndim and value.dtype.kind in "biufc" else None
    if isinstance(value, dict):
        inside = [_of_list(each) if isinstance(each, list) else _find(each) for each in value.values()]
        return max((each for each in inside if each is not None), key=itemgetter(0), default=None)
    if isinstance(value, list) and not _are_inputs(value):
        return _of_list(value)
    parts = value if isinstance(value, (list, tuple)) else tensors_in(value)
    return next((each for each in map(_find, parts) if each is not None), None)


def _of_list(value: list[Any]) -> tuple[float, int] | None:
    return (0 if isinstance(value[0], str | int | float) else math.inf, len(value)) if value else None


def _are_inputs(tensors: list[Any]) -> bool:
    """Whether the list is not of samples, but of one or two batches: a StyleGAN's latents, of which it may mix two."""
    shapes = {tuple(each.shape) for each in tensors if isinstance(each, torch.Tensor)}
    return len(tensors) <= 2 and len(shapes) == 1 and len(shapes.pop()) == 2


def _said_by(value: Any) -> int | None:
    """The number of samples that an object states: graphs of PyTorch Geometric and DGL, packed sequences.

    A dictionary, such as OpenPCDet's, must also contain something of that size: it may just hold a script's options.
    """
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, (torch.Tensor, torch.nn.Module, list, tuple)):
        return None
    names = ("num_graphs", "batch_size")
    is_dict = isinstance(value, dict)
    counts = map(value.get, names) if is_dict else (getattr(value, name, None) for name in names)
    said = next((count for count in counts if type(count) is int), None)
    if said is None or not tensors_in(value):  # a script's options may have such an entry, too
        return None
    return said if not is_dict or said in map(_rows_of, value.values()) else None


def show_inputs(inputs: Any) -> str:
    """A description of the first tensors and arrays of the inputs, for an error."""
    args, kwargs = inputs
    arrays = [array for value in (*args, *kwargs.values()) for array in _arrays_in(value)]
    shown = [describe_tensor(tensor) for tensor in tensors_in(inputs)]
    shown += [f"numpy {array.dtype}{list(array.shape)}" for array in arrays]
    return ", ".join(shown[:4]) or "no tensor"


def _arrays_in(value: Any) -> list[_Array]:
    if isinstance(value, np.ndarray):
        return [value] if value.dtype.kind in "biufc" else []
    return [array for each in value.values() for array in _arrays_in(each)] if isinstance(value, dict) else []
