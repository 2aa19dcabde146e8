"""Walks autograd's graph: which parameters a backward pass reaches, and whether a checkpoint hides some.

Also hooks on the nodes that accumulate into parameters; and the one node that this package puts into the graph: behind
means of gradients, by which nothing goes back.
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

# Nodes that are looked at before a model counts as one that begins with layers of its own.
_MAX_LOOKED_AT = 64
_LEAF = "torch::autograd::AccumulateGrad"


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


def begins_with_checkpoint(root: Node | None, own: frozenset[int]) -> bool:
    """Whether a backward pass from `root` comes to a re-entrant checkpoint before any of the leaves in `own`.

    What is inside such a checkpoint is no part of its graph: the checkpoint runs a backward pass within this one.

    Args:
        root: node of the graph at which the backward pass begins, such as that of an output; None for nothing.
        own: `id` of the parameters.
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
    """Who is told of gradients; see `BackwardPass`."""

    has_filler: bool

    def on_param_grad(self, index: int, bucket: int | None = None) -> None:
        """A gradient has come to a parameter: the sentinel of that bucket, or one that is watched."""


class AccumulationHook:
    """A function that is called whenever a gradient of a parameter has come, and the parameter's own hooks have run.

    [Note: hooks of others] A post-accumulate hook would run before those that the user registers later, which may
    change `.grad`: clip it, scale it, put another tensor there. The node that accumulates calls its hooks after all
    of those. It is kept alive here, because autograd makes a new one when nobody holds it.

    Args:
        function: called with what torch's node hooks are.
        is_before: call it before the gradient is accumulated, with what is about to be; it may return something else.

    Attributes:
        node: the one that accumulates.
    """

    def __init__(self, parameter: torch.Tensor, function: Callable[..., Any], is_before: bool = False) -> None:
        with without_transforms():
            is_frozen = not parameter.requires_grad
            if is_frozen:  # for now: the node stays the same when it is thawed
                parameter.requires_grad = True
            self.node: Node = get_gradient_edge(parameter).node
            if is_frozen:
                parameter.requires_grad = False
        register: Callable[..., RemovableHandle] = self.node.register_prehook if is_before else self.node.register_hook
        self._handle = register(function)

    def remove(self) -> None:
        """Never call it again."""
        self._handle.remove()


def remove_all(hooks: Iterable[AccumulationHook]) -> None:
    """Never call any of them again."""
    for hook in hooks:
        hook.remove()


def runs_backward_by(nodes: Iterable[Node]) -> bool:
    """Whether the backward pass under way runs any of `nodes`; called inside it. No for certain only with all nodes.

    Args:
        nodes: those that accumulate into some parameters. To find them is what `runs_backward_to` takes its time for.
    """
    try:
        return any(map(will_engine_execute_node, nodes))
    except (RuntimeError, AttributeError):
        # What torch says of a leaf that autograd.grad was asked for; and under torch.func, which has no leaves.
        return False


def runs_backward_to(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the backward pass under way gives a gradient to any of `parameters`; called inside it.

    False under `torch.autograd.grad`, and where all that the pass reaches are other models and inputs.
    """
    return runs_backward_by(get_gradient_edge(each).node for each in parameters if each.requires_grad)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: torch.Tensor) -> torch.Tensor:
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise ModelError(
            "a loss contains `.grad` of a model's parameters (backward(create_graph=True)). They are means over the "
            "ranks, through which no gradient goes back. Make the gradients by torch.autograd.grad(loss, "
            "list(model.parameters()), create_graph=True), add what you make of them to the loss, and call backward() "
            "once, on the whole loss"
        )


def without_way_back(mean: torch.Tensor) -> torch.Tensor:
    """A copy of `mean` that requires a gradient, as one process has it, and raises ModelError where one comes.

    As a constant it would leave its part of a loss's gradient out without a word.
    """
    with torch.enable_grad():
        way_back: torch.Tensor = _Mean.apply(mean.detach().requires_grad_())  # type: ignore[no-untyped-call]
    return way_back
