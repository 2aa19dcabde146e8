"""How many rows the inputs of a model may have.

[Note: telling sizes] Where no loader of Lockstep says what a batch is, ranks compare the sizes of their inputs, and
ranks with different sizes do not go on. Not every size is one of samples: an image model of ultralytics takes a
dictionary with the boxes of all images in one tensor, of which each rank has its own number. So only those are compared
that samples come in as a rule: of the first tensor among the arguments, of the tensors with the most dimensions, and
lengths of lists. Objects that say how many samples they hold (graphs, packed sequences) are taken at their word, and a
tensor beside one, with as many rows as something in it has, is of its nodes or edges, not of samples.
Of point clouds the tensors with the most dimensions are those of voxels, of which each rank has its own number, too. So
the tensors in a dictionary do not tell where a `batch_size` in it does, or a list of records or objects beside it, and
a second thing in the dictionary has that size: boxes of each sample, or a list of clouds.
*Rejected:* one size that all ranks share: a tensor that is the same on every rank, such as a list of classes, would
hide that the batches differ.

[Note: arrays] Arrays of numbers of NumPy tell as tensors do where they are arguments, or values of dictionaries: some
programs hand observations over so, and the model converts them. In lists they are often images, whose first size is
their height.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from lockstep.comm.wording import describe_tensor
from lockstep.tree import tensors_in

__all__ = ["rows_in", "show_inputs", "sizes_of"]

_Array = np.ndarray[Any, Any]
_Rows = torch.Tensor | _Array


def rows_in(inputs: Any) -> int | None:
    """The one number that may stand for a batch. See [Note: one size] in `feeding.py`.

    Args:
        inputs: positional and keyword arguments of a model.

    Returns:
        None where no argument has rows.
    """
    args, kwargs = inputs
    values = (*args, *kwargs.values())
    for find in (_said_by, _rows_of):
        found = next((rows for rows in map(find, values) if rows is not None), None)
        if found is not None:
            return found
    return None


def _rows_of(value: Any) -> int | None:
    if isinstance(value, list) and value and not _are_inputs(value):
        return len(value)
    inside = _rows_in(value)
    return _size(inside[0]) if inside else None


def sizes_of(inputs: Any) -> frozenset[int]:
    """What ranks compare where nothing says how many samples a forward pass holds. See [Note: telling sizes]. Local.

    Args:
        inputs: positional and keyword arguments of a model.

    Returns:
        First sizes of tensors, and lengths of lists of anything else.
    """
    found = _Found()
    args, kwargs = inputs
    for value in (*args, *kwargs.values()):
        found.look(value)
    return found.sizes()


class _Found:
    """What is known of the arguments so far."""

    def __init__(self) -> None:
        self._lengths: set[int] = set()  # of lists, and what objects say
        self._inside: set[int] = set()  # of objects that say how many samples they hold: numbers of nodes, say
        self._tensors: list[_Rows] = []
        self._first: _Rows | None = None  # among the arguments, not inside of a dictionary or an object
        self._records: set[int] = set()  # lengths of lists of dictionaries or objects
        self._dicts: list[dict[Any, Any]] = []

    def look(self, value: Any) -> None:
        """An argument."""
        said = _said_by(value)
        if said is not None:
            self._lengths.add(said)
            self._inside |= set(map(_size, filter(torch.Tensor.dim, tensors_in(value)))) | _num_parts_of(value)
        elif isinstance(value, (list, tuple)) and value and not isinstance(value[0], torch.Tensor):
            if isinstance(value, list) or not isinstance(value[0], int | float | None):
                self._lengths.add(len(value))  # else a shape, or numbers of heads; samples come in lists
            if isinstance(value, list) and not any(
                isinstance(each, str | int | float | list | tuple) for each in value
            ):
                self._records.add(len(value))
        else:
            self._look_at_tensors(value)

    def _look_at_tensors(self, value: Any) -> None:
        if isinstance(value, list) and not _are_inputs(value):  # of samples, such as the images of detection models
            self._lengths.add(len(value))
        if isinstance(value, dict):
            self._dicts.append(value)
        found = _rows_in(value)
        if self._first is None and found and isinstance(value, (torch.Tensor, np.ndarray, list, tuple)):
            self._first = found[0]
        self._tensors += found

    def sizes(self) -> frozenset[int]:
        silent = {
            id(each)
            for inputs in self._dicts
            if self._records.intersection(_sizes_in(inputs))
            for each in _rows_in(inputs)
        }
        may_tell = [each for each in self._tensors if id(each) not in silent]
        most = max((each.ndim for each in may_tell), default=0)
        telling = [each for each in may_tell if each is self._first or each.ndim == most]
        return frozenset(self._lengths).union(set(map(_size, telling)) - self._inside)


def _are_inputs(tensors: list[Any]) -> bool:
    """Whether they are no samples, but one or two batches: a StyleGAN's latents, of which it mixes two now and then."""
    shapes = {tuple(each.shape) for each in tensors if isinstance(each, torch.Tensor)}
    return len(tensors) <= 2 and len(shapes) == 1 and len(shapes.pop()) == 2


def _rows_in(value: Any) -> list[_Rows]:
    """Tensors and arrays with rows."""
    tensors = [each for each in tensors_in(value) if not isinstance(each, torch.nn.Parameter)]
    rows: list[_Rows] = [*tensors, *_arrays_in(value)]
    return [each for each in rows if each.ndim > 0]


def _arrays_in(value: Any) -> list[_Array]:
    """See [Note: arrays]."""
    if isinstance(value, np.ndarray):
        return [value] if value.dtype.kind in "biufc" else []
    return [array for each in value.values() for array in _arrays_in(each)] if isinstance(value, dict) else []


def _sizes_in(inputs: dict[Any, Any]) -> set[int]:
    """First sizes of the tensors in a dictionary, and lengths of its lists of tensors."""
    lists = (each for each in inputs.values() if isinstance(each, list) and each and isinstance(each[0], torch.Tensor))
    return set(map(_size, _rows_in(inputs))).union(map(len, lists))


def _size(tensor: _Rows) -> int:
    return int(tensor.size(0) if isinstance(tensor, torch.Tensor) else tensor.shape[0])  # nested ones have no shape


def _said_by(value: Any) -> int | None:
    """How many samples an object holds, if it says so: graphs of PyTorch Geometric and DGL, packed sequences.

    A dictionary, such as OpenPCDet's, must hold something of that size, too: it may have come with a script's options.
    """
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, (torch.Tensor, torch.nn.Module, list, tuple)):
        return None
    names = ("num_graphs", "batch_size")
    if isinstance(value, dict):
        sizes = _sizes_in(value)
        counts: list[Any] = [count for count in map(value.get, names) if type(count) is int and count in sizes]
    else:
        counts = [getattr(value, name, None) for name in names]
    said = next((count for count in counts if type(count) is int), None)
    return said if said is not None and tensors_in(value) else None  # options of a script say such things, too


def _num_parts_of(graph: Any) -> set[int]:
    """Nodes and edges, which DGL does not keep where `tensors_in` looks; its methods are properties elsewhere."""
    found = set()
    for name in ("num_nodes", "num_edges"):
        number = getattr(graph, name, None)
        with contextlib.suppress(TypeError):  # it wants an argument
            found.add(number() if callable(number) else number)
    return {each for each in found if type(each) is int}


def show_inputs(inputs: Any) -> str:
    """The first tensors and arrays of the inputs in words, for an error."""
    args, kwargs = inputs
    arrays = [array for value in (*args, *kwargs.values()) for array in _arrays_in(value)]
    shown = [describe_tensor(tensor) for tensor in tensors_in(inputs)]
    shown += [f"numpy {array.dtype}{list(array.shape)}" for array in arrays]
    return ", ".join(shown[:4]) or "no tensor"
