"""Queries of autograd inside of a backward pass, and of the transforms of torch.func."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import Node

from lockstep.torch_private.lookup import attribute, need

__all__ = [
    "base_of",
    "current_graph_task_id",
    "current_node",
    "innermost_transform",
    "outside_transforms",
    "queue_callback",
    "tensors_within",
    "version_of",
    "will_engine_execute_node",
    "without_transforms",
]

current_graph_task_id: Callable[[], int] = need("torch._C._current_graph_task_id")
"""Number of the backward pass that runs on this thread; -1 outside of one."""

current_node: Callable[[], Node | None] = need("torch._C._current_autograd_node")
"""The node that the backward pass on this thread is executing, even in a hook of a tensor; None outside of one."""

will_engine_execute_node: Callable[[Any], bool] = need("torch._C._will_engine_execute_node")
"""Whether the current backward pass will execute a node; RuntimeError for a leaf passed to `autograd.grad`."""

queue_callback: Callable[[Callable[[], None]], None] = need("torch.autograd.Variable._execution_engine.queue_callback")
"""Register a function to be called at the end of the current backward pass; RuntimeError outside of one."""

version_of: Callable[[torch.Tensor], int] = attribute("torch.Tensor._version", default=0)
"""The number of in-place writes to a tensor."""

base_of: Callable[[torch.Tensor], torch.Tensor | None] = attribute("torch.Tensor._base", default=None)
"""The tensor of which a tensor is a view, for autograd; else None."""

innermost_transform: Callable[[], Any] = need("torch._C._functorch.peek_interpreter_stack")
"""The transform of `torch.func` (grad, vmap, …) that is active on this thread; None if there is none."""

without_transforms: Callable[[], AbstractContextManager[object]] = need("torch._C._DisableFuncTorch")
"""A context in which tensors behave as outside of the transforms of `torch.func`."""

_transform_of: Callable[[torch.Tensor], int] = need("torch._C._functorch.maybe_get_level")
_unwrapped: Callable[[torch.Tensor], torch.Tensor] = need("torch._C._functorch.get_unwrapped")
_in_outer_transform: Callable[[], AbstractContextManager[object]] = need(
    "torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack"
)


def outside_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is outside of the transforms of `torch.func`: under vmap, the whole batch. Local."""
    while _transform_of(tensor) >= 0:
        tensor = _unwrapped(tensor)
    return tensor


def tensors_within(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor, its tangents in forward-mode differentiation, and what all these are outside of each transform. Local.

    Gradients that are computed outside of a transform of `torch.func` do not pass through the tensor that a function
    inside of it sees, but through the one that this wraps.
    """
    found, transform = [tensor], innermost_transform()
    if forward_ad._current_level >= 0 and (transform is None or transform.key().name == "Jvp"):
        tangent = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
        found += [] if tangent is None else [tangent]
    if transform is None:
        return found
    wrapped = [each for each in found if _transform_of(each) == transform.level()]
    with _in_outer_transform():
        return found + [inner for each in wrapped for inner in tensors_within(_unwrapped(each))]
