"""Which parameters a loss can reach, and tensors inside whatever a model takes and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map

__all__ = ["map_tensors", "reachable_leaves"]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `function` applied to every tensor in it.

    Looks into what torch's pytree knows (lists, tuples, dicts, named tuples, …) and dataclasses.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            field.name: map_tensors(function, getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **changes)

    def on_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return map_tensors(function, leaf)
        return leaf

    return tree_map(on_leaf, value)


def reachable_leaves(roots: Iterable[Node]) -> set[int]:
    """`id` of every leaf tensor (parameter) that a backward pass from `roots` would give a gradient."""
    leaves: set[int] = set()
    seen: set[Node] = set()
    stack = [root for root in roots if root is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.add(id(variable))
        stack.extend(following for following, _ in node.next_functions if following is not None)
    return leaves
