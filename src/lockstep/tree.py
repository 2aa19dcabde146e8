"""Tensors inside whatever a loader yields, and a model takes and returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from lockstep.torch_private.trees import tree_flatten, tree_unflatten

__all__ = ["map_tensors", "tensors_in"]

_TensorFunction = Callable[[torch.Tensor], torch.Tensor]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor that `map_tensors` finds in `value`, each once, in its order."""
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

    Looks into lists, tuples, dicts and subclasses of them, dataclasses, whatever else torch's pytree
    knows, and the attributes of any other object but modules. A container is copied only if a tensor in it
    was replaced by another, so that `value` itself comes back where `function` only looks.
    """
    return function(value) if isinstance(value, torch.Tensor) else _map(function, value, {})


def _map(function: _TensorFunction, value: Any, memo: dict[int, Any]) -> Any:
    """One value. `memo` has the results so far by `id`, and for what is under way the value itself."""
    if value is None or isinstance(value, (str, bytes, int, float, complex, type, torch.nn.Module)):
        return value
    if id(value) not in memo:
        memo[id(value)] = value
        memo[id(value)] = function(value) if isinstance(value, torch.Tensor) else _map_inside(function, value, memo)
    return memo[id(value)]


def _map_inside(function: _TensorFunction, value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, dict):
        return _rebuilt(value, _changes(function, value, memo), "items")
    if isinstance(value, list):
        return _rebuilt(value, _changes(function, dict(enumerate(value)), memo), "items")
    if isinstance(value, tuple):
        changes = _changes(function, dict(enumerate(value)), memo)
        return _tuple_like(value, [changes.get(i, item) for i, item in enumerate(value)]) if changes else value
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return _rebuilt(value, _changes(function, fields, memo), "attributes")
    leaves, spec = tree_flatten(value)
    if not (len(leaves) == 1 and leaves[0] is value):
        changes = _changes(function, dict(enumerate(leaves)), memo)
        return tree_unflatten([changes.get(i, leaf) for i, leaf in enumerate(leaves)], spec) if changes else value
    if callable(value) or not hasattr(value, "__dict__"):
        return value
    return _rebuilt(value, _changes(function, vars(value), memo), "attributes")


def _changes(function: _TensorFunction, items: dict[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    """Those of `items` that are replaced, with what replaces them."""
    mapped = ((key, item, _map(function, item, memo)) for key, item in list(items.items()))
    return {key: new for key, item, new in mapped if new is not item}


def _rebuilt(value: Any, changes: dict[Any, Any], kind: str) -> Any:
    if not changes:
        return value
    rebuilt = copy.copy(value)
    for key, item in changes.items():
        if kind == "items":
            rebuilt[key] = item
        else:
            object.__setattr__(rebuilt, key, item)  # also where the class is frozen
    return rebuilt


def _tuple_like(value: tuple[Any, ...], items: Sequence[Any]) -> Any:
    kind = type(value)
    if hasattr(kind, "_make"):  # a named tuple
        return cast(Any, kind)._make(items)
    if kind.__module__ == "torch.return_types":
        return cast(Any, kind)(items)
    return tuple.__new__(kind, items)
