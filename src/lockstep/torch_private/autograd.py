"""What the engine asks autograd inside of a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep.torch_private.lookup import attribute, need

__all__ = ["base_of", "current_graph_task_id", "queue_callback", "version_of", "will_engine_execute_node"]

current_graph_task_id: Callable[[], int] = need("torch._C._current_graph_task_id")
"""Number of the backward pass that runs on this thread; -1 outside of one."""

will_engine_execute_node: Callable[[Any], bool] = need("torch._C._will_engine_execute_node")
"""Whether the backward pass under way runs a node; RuntimeError for a leaf that `autograd.grad` was asked for."""

queue_callback: Callable[[Callable[[], None]], None] = need("torch.autograd.Variable._execution_engine.queue_callback")
"""Have a function called at the end of the backward pass under way; RuntimeError outside of one."""

version_of: Callable[[torch.Tensor], int] = attribute("torch.Tensor._version", default=0)
"""How often a tensor has been written to in place."""

base_of: Callable[[torch.Tensor], torch.Tensor | None] = attribute("torch.Tensor._base", default=None)
"""The tensor that a tensor is a view of, for autograd; else None."""
