"""Walks autograd's graph: which parameters a backward pass reaches, and whether a checkpoint hides some.

Also hooks on the nodes that accumulate into parameters, and the only graph node that this package adds: after means of
gradients, through which no gradient may go back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Protocol, cast

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lockstep.errors import ModelError
from lockstep.torch_private.autograd import will_engine_execute_node, without_transforms

__all__ = [
    "AccumulationHook",
    "Listener",
    "begins_with_checkpoint",
    "reachable_leaves",
    "remove_all",
    "runs_backward_by",
    "runs_backward_to",
    "without_way_back",
]

# Number of nodes to search before a model counts as beginning with its own layers.
_MAX_LOOKED_AT = 64
_LEAF = "torch::autograd::AccumulateGrad"


def reachable_leaves(roots: Iterable[Node]) -> set[int]:
    """`id` of every leaf tensor (parameter) that gets a gradient in a backward pass from `roots`."""
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


def begins_with_checkpoint(root: Node | None, own: frozenset[int]) -> bool:
    """Whether a backward pass from `root` reaches a re-entrant checkpoint before any of the leaves in `own`.

    The inside of such a checkpoint is not part of the graph: the checkpoint runs a backward pass within this one.

    Args:
        root: node at which the backward pass begins, such as that of an output, or None.
        own: `id` of each parameter.
    """
    waiting = [] if root is None else [root]
    for node in islice(waiting, _MAX_LOOKED_AT):  # the list grows meanwhile
        name = node.name()
        if name == _LEAF:
            if id(cast(Any, node).variable) in own:
                return False
        elif "Checkpoint" in name:
            return True
        else:
            waiting += [following for following, _ in node.next_functions if following is not None]
    return False


class Listener(Protocol):
    """An object that is notified of gradients; see `BackwardPass`."""

    has_filler: bool

    def on_param_grad(self, index: int, bucket: int | None = None) -> None:
        """A gradient has come to a parameter: the sentinel of that bucket, or a watched one."""


class AccumulationHook:
    """Calls a function after each gradient of a parameter, once the parameter's own hooks have run.

    [Note: hooks of others] A post-accumulate hook would run before hooks that the user registers later, which may
    change `.grad`: clip, scale or replace it. The accumulating node calls its hooks after all of those. It is kept
    alive here, because otherwise autograd would create a new one.

    Args:
        function: called with the arguments of torch's node hooks.
        is_before: call it before the gradient is accumulated; it may return a replacement for it.

    Attributes:
        node: the accumulating node.
    """

    def __init__(self, parameter: torch.Tensor, function: Callable[..., Any], is_before: bool = False) -> None:
        with without_transforms():
            is_frozen = not parameter.requires_grad
            if is_frozen:  # unfrozen only for now: the node stays the same
                parameter.requires_grad = True
            self.node: Node = get_gradient_edge(parameter).node
            if is_frozen:
                parameter.requires_grad = False
        register: Callable[..., RemovableHandle] = self.node.register_prehook if is_before else self.node.register_hook
        self._handle = register(function)

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()


def remove_all(hooks: Iterable[AccumulationHook]) -> None:
    """Remove these hooks."""
    for hook in hooks:
        hook.remove()


def runs_backward_by(nodes: Iterable[Node]) -> bool:
    """Whether the current backward pass runs any of `nodes`; called inside it. A no is certain only with all nodes.

    Args:
        nodes: nodes that accumulate into some parameters. Finding them is the slow part of `runs_backward_to`.
    """
    try:
        return any(map(will_engine_execute_node, nodes))
    except (RuntimeError, AttributeError):
        # torch's error for a leaf passed to autograd.grad; and under torch.func, which has no leaves.
        return False


def runs_backward_to(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the current backward pass gives a gradient to any of `parameters`; called inside it.

    False under `torch.autograd.grad`, and if the pass reaches only other models and inputs.
    """
    return runs_backward_by(get_gradient_edge(each).node for each in parameters if each.requires_grad)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: torch.Tensor) -> torch.Tensor:
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise ModelError(
            "a loss contains `.grad` of a model's parameters (backward(create_graph=True)). These are means over the "
            "ranks, and no gradient flows back through them. Compute the gradients with torch.autograd.grad(loss, "
            "list(model.parameters()), create_graph=True), add the term made from them to the loss, and call "
            "backward() once, on the whole loss"
        )


def without_way_back(mean: torch.Tensor) -> torch.Tensor:
    """A copy of `mean` that requires a gradient, as in one process, but raises ModelError if it gets one.

    As a constant it would silently drop its part of a loss's gradient.
    """
    with torch.enable_grad():
        way_back: torch.Tensor = _Mean.apply(mean.detach().requires_grad_())  # type: ignore[no-untyped-call]
    return way_back
