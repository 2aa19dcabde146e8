"""What a backward pass reaches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.graph import Node, get_gradient_edge

from lockstep.torch_private.autograd import will_engine_execute_node

__all__ = ["reachable_leaves", "runs_backward_to"]


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


def runs_backward_to(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the backward pass under way gives a gradient to any of `parameters`; called inside it.

    False under `torch.autograd.grad`, and where all that the pass reaches are other models and inputs.
    """
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        try:
            if will_engine_execute_node(get_gradient_edge(parameter).node):
                return True
        except RuntimeError:  # what torch says of a leaf that autograd.grad was asked for
            return False
    return False
