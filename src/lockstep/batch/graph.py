"""Which forward passes a tensor comes from, found in its autograd graph.

An engine marks the graph nodes of its outputs. Given a loss, the marks are found by walking its graph backwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.autograd.graph import Node

__all__ = ["find_marks", "mark", "marks_tell_shares", "names_behind", "reset"]

_KEY = "lockstep.forward"
# Number of nodes after which a walk stops: a mark would have been found by then.
_MAX_NODES = 100_000

_tells_shares = False  # whether any marked forward pass knows its share, or will


def _metadata(node: Node) -> dict[Any, Any]:
    return cast("dict[Any, Any]", node.metadata)  # typed as a method in torch's stubs, but a property


def mark(output: torch.Tensor, forward: object, tells_share: bool) -> Node:
    """Mark an output of a forward pass; returns its node. Local.

    Args:
        output: requires a gradient.
        forward: the value that `find_marks` returns.
        tells_share: whether it knows its share of the batch, or will before the backward pass.
    """
    global _tells_shares
    _tells_shares = _tells_shares or tells_share
    node = output.grad_fn
    assert node is not None
    _metadata(node)[_KEY] = forward
    return node


def marks_tell_shares() -> bool:
    """Whether any mark of this process may give the share of a batch; if not, graphs need not be walked for one."""
    return _tells_shares


def reset() -> None:
    """Forget all marks. Local."""
    global _tells_shares
    _tells_shares = False


def find_marks(tensor: torch.Tensor) -> list[Any]:
    """The distinct forward passes whose outputs `tensor` was computed from; empty without a graph. Local."""
    found: dict[int, Any] = {}
    for _ in _walk(tensor.grad_fn, found):
        pass
    return list(found.values())


def names_behind(tensor: torch.Tensor) -> set[str]:
    """The names of the nodes between `tensor` and the marks that it leads to."""
    found: dict[int, Any] = {}
    return {node.name() for node in _walk(tensor.grad_fn, found)}


def _walk(root: Node | None, found: dict[int, Any]) -> Iterator[Node]:
    """The nodes reachable from `root`, up to those with a mark, whose marks go into `found` by `id`."""
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
