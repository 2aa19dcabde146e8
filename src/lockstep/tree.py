"""Finds, replaces and moves the tensors inside whatever a loader yields, or a model takes or returns."""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch.nn.utils.rnn import PackedSequence

from lockstep.torch_private.trees import tree_flatten, tree_unflatten

__all__ = ["map_tensors", "move_tensors", "tensors_in"]

_TensorFunction = Callable[[torch.Tensor], torch.Tensor]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in `value`, once each, in the order of `map_tensors`."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) in (tuple, list) and all(type(item) is torch.Tensor for item in value):
        return list(value)  # What most loaders yield and most models take.
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def map_tensors(function: _TensorFunction, value: Any) -> Any:
    """`value` with `function` applied to every tensor in it, once to one that occurs several times.

    Looks into lists, tuples, dicts and their subclasses, dataclasses, whatever else torch's pytree knows, and the
    attributes of any other object except modules and functions. A container is copied only if a tensor in it was
    replaced, so `value` itself is returned if `function` replaces none. If parts of an object refer back to it (to a
    parent, also by weak reference), those of the copy refer to the copy.
    """
    return function(value) if isinstance(value, torch.Tensor) else _Mapping(function).result(value)


def move_tensors(value: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """`value` with its tensors on that device; lengths of packed sequences stay on the CPU, where torch reads them."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=non_blocking)

    return move(value) if isinstance(value, torch.Tensor) else _Mapping(move, but_lengths=True).result(value)


# Types that are not searched. Other callable objects may hold tensors, such as the graphs of PyTorch Geometric.
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, functools.partial, weakref.ref)


class _Mapping:
    """One call of `map_tensors`.

    Args:
        function: applied to tensors.
        but_lengths: whether to leave out `batch_sizes` of packed sequences.

    Attributes:
        owners: `id` of an object with replaced attributes -> (the object, its copy).
    """

    def __init__(self, function: _TensorFunction, but_lengths: bool = False) -> None:
        self._but_lengths = but_lengths
        self.owners: dict[int, tuple[Any, Any]] = {}
        self._function = function
        self._memo: dict[int, Any] = {}  # results by `id`; the value itself while it is being mapped
        self._copies: list[Any] = []

    def result(self, value: Any) -> Any:
        mapped = self.map(value)
        if self.owners:
            self._rebind()
        return mapped

    def map(self, value: Any) -> Any:
        if value is None or isinstance(value, (str, bytes, int, float, complex, type, torch.nn.Module)):
            return value
        if id(value) not in self._memo:
            self._memo[id(value)] = value
            mapped = self._function(value) if isinstance(value, torch.Tensor) else self._map_inside(value)
            self._memo[id(value)] = mapped
        return self._memo[id(value)]

    def _map_inside(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self._with_items(value, self._changes(value))
        if isinstance(value, list):
            return self._with_items(value, self._changes(dict(enumerate(value))))
        if isinstance(value, tuple):
            return self._map_tuple(value)
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
            return self._with_attributes(value, self._changes(fields))
        leaves, spec = tree_flatten(value)
        if not (len(leaves) == 1 and leaves[0] is value):
            changes = self._changes(dict(enumerate(leaves)))
            return tree_unflatten([changes.get(i, leaf) for i, leaf in enumerate(leaves)], spec) if changes else value
        if isinstance(value, _FUNCTIONS) or not hasattr(value, "__dict__"):
            return value
        return self._with_attributes(value, self._changes(vars(value)))

    def _map_tuple(self, value: tuple[Any, ...]) -> Any:
        lengths = value.batch_sizes if self._but_lengths and isinstance(value, PackedSequence) else self
        changes = self._changes({i: item for i, item in enumerate(value) if item is not lengths})
        return _tuple_like(value, [changes.get(i, item) for i, item in enumerate(value)]) if changes else value

    def _changes(self, items: dict[Any, Any]) -> dict[Any, Any]:
        """Those of `items` that are replaced, with their replacements."""
        mapped = ((key, item, self.map(item)) for key, item in list(items.items()))
        return {key: new for key, item, new in mapped if new is not item}

    def _with_items(self, value: Any, changes: dict[Any, Any]) -> Any:
        if not changes:
            return value
        copied = copy.copy(value)
        for key, item in changes.items():
            copied[key] = item
        self._copies.append(copied)
        return copied

    def _with_attributes(self, value: Any, changes: dict[str, Any]) -> Any:
        if not changes:
            return value
        copied = _copy_with(value, changes)
        self._copies.append(copied)
        self.owners[id(value)] = value, copied
        return copied

    def _rebind(self) -> None:
        """Make parts of copied objects refer to the copies."""
        copies = {id(each) for each in self._copies}
        for holder in self._copies:
            for key, item in _entries_of(holder):
                owner = self._copy_of(item)
                if owner is None and id(item) not in copies and not isinstance(item, torch.nn.Module):
                    knows = [(name, self._copy_of(each)) for name, each in _attributes_of(item)]
                    changes = {name: each for name, each in knows if each is not None}
                    owner = _copy_with(item, changes) if changes else None
                if owner is None:
                    continue
                if isinstance(holder, (dict, list)):
                    holder[key] = owner
                else:
                    object.__setattr__(holder, key, owner)

    def _copy_of(self, value: Any) -> Any:
        """The copy of an object with replaced attributes, or of a weak reference to one; None for anything else."""
        if type(value) is weakref.ref:
            owner = self._copy_of(value())
            return None if owner is None else weakref.ref(owner)
        return self.owners.get(id(value), (None, None))[1]


def _entries_of(holder: Any) -> list[tuple[Any, Any]]:
    if isinstance(holder, dict):
        return list(holder.items())
    return list(enumerate(holder)) if isinstance(holder, list) else _attributes_of(holder)


def _attributes_of(value: Any) -> list[tuple[str, Any]]:
    return [] if isinstance(value, (type, *_FUNCTIONS)) else list(getattr(value, "__dict__", {}).items())


def _copy_with(value: Any, attributes: dict[str, Any]) -> Any:
    copied = copy.copy(value)
    for name, item in attributes.items():
        object.__setattr__(copied, name, item)  # works for frozen classes, too
    return copied


def _tuple_like(value: tuple[Any, ...], items: Sequence[Any]) -> Any:
    kind = type(value)
    if hasattr(kind, "_make"):  # a named tuple
        return cast(Any, kind)._make(items)
    if kind.__module__ == "torch.return_types":
        return cast(Any, kind)(items)
    return tuple.__new__(kind, items)
