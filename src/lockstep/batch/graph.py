"""Which forward passes a tensor comes from, told by its graph.

An engine marks the graph nodes of its outputs. A function that is given a loss finds the marks by walking back from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.autograd.graph import Node

__all__ = [
    "find_marks",
    "mark",
    "marks_tell_shares",
    "names_behind",
    "reset",
]

_KEY = "lockstep.forward"
# A graph that is walked further than that without an end is not walked on: a mark would have been found.
_MAX_NODES = 100_000


_tells_shares = False  # whether a forward pass was marked that knows its share, or will


def _metadata(node: Node) -> dict[Any, Any]:
    return cast("dict[Any, Any]", node.metadata)  # typed as a method in torch's stubs, but a property


def mark(output: torch.Tensor, forward: object, tells_share: bool) -> Node:
    """Mark an output of a forward pass; returns its node. Local.

    Args:
        output: requires a gradient.
        forward: what `find_marks` finds.
        tells_share: it knows what this rank holds of its batch, or will before the backward pass.
    """
    global _tells_shares
    _tells_shares = _tells_shares or tells_share
    node = output.grad_fn
    assert node is not None
    _metadata(node)[_KEY] = forward
    return node


def marks_tell_shares() -> bool:
    """Whether any mark of this process may tell the share of a batch; if not, no graph need be walked for one."""
    return _tells_shares


def reset() -> None:
    """Forget that there were marks. Local."""
    global _tells_shares
    _tells_shares = False


def find_marks(tensor: torch.Tensor) -> list[Any]:
    """The forward passes whose outputs `tensor` was computed from, each once; empty without a graph. Local."""
    found: dict[int, Any] = {}
    for _ in _walk(tensor.grad_fn, found):
        pass
    return list(found.values())


def names_behind(tensor: torch.Tensor) -> set[str]:
    """The names of the nodes between `tensor` and the marks that it leads to."""
    found: dict[int, Any] = {}
    return {node.name() for node in _walk(tensor.grad_fn, found)}


def _walk(root: Node | None, found: dict[int, Any]) -> Iterator[Node]:
    """The nodes behind `root`, up to those with a mark, whose marks go into `found` by `id`."""
    stack = [] if root is None else [root]
    seen: set[Node] = set()
    while stack and len(seen) < _MAX_NODES:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        forward = _metadata(node).get(_KEY)
        if forward is None:
            yield node
            stack.extend(following for following, _ in node.next_functions if following is not None)
        else:
            found[id(forward)] = forward
