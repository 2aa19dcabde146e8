"""Shared by Apex's fused optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["ZeroGrad", "complete_groups", "is_narrow", "loss_of", "norm_of"]


class ZeroGrad:
    """Apex's `set_grad_none`, as the default of torch's `set_to_none`."""

    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set gradients to None if `set_grad_none`, otherwise to zero."""
        chosen = self.set_grad_none if set_to_none is None else set_to_none
        super().zero_grad(chosen)  # type: ignore[misc]


def is_narrow(tensor: Tensor) -> bool:
    """Whether a tensor has 16-bit floats, for which Apex's kernels compute in float32."""
    return tensor.is_floating_point() and tensor.element_size() < 4


def norm_of(tensor: Tensor, order: float = 2.0) -> Tensor:
    """The norm of all elements, float64[]; in float32 it is off by 0.1% for an embedding with 33 million elements."""
    norm: Tensor = torch.linalg.vector_norm(tensor, order, dtype=torch.float64)
    return norm


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of a `step` with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def complete_groups(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Add options that are missing in loaded groups, which another optimizer may have saved. Local.

    Args:
        optimizer: the optimizer that loads the groups.
        state: the argument of its `__setstate__`: from `load_state_dict`, or of a pickled optimizer.

    Returns:
        The optimizer's own options.
    """
    defaults: dict[str, Any] = state.get("defaults") or optimizer.defaults
    for group in state["param_groups"]:
        for name, value in defaults.items():
            group.setdefault(name, value)
    return defaults
