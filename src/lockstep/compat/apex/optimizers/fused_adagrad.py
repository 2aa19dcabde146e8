"""`apex.optimizers.FusedAdagrad`."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.compat.apex.optimizers.base import ZeroGrad, complete_groups
from lockstep.errors import InputError

__all__ = ["FusedAdagrad"]


class FusedAdagrad(ZeroGrad, torch.optim.Adagrad):
    """`torch.optim.Adagrad`.

    Args:
        params: parameters or groups.
        lr: learning rate.
        eps: added to the square root in the denominator.
        weight_decay: see torch.
        set_grad_none: `zero_grad` sets gradients to None instead of zero.
        adagrad_w_mode: must be False.

    Raises:
        InputError: `adagrad_w_mode` is True.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        if adagrad_w_mode:
            raise InputError("FusedAdagrad(adagrad_w_mode=True) is not supported: torch's Adagrad has L2 decay only")
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, weight_decay=weight_decay, eps=eps)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also accepts Apex's checkpoints, which do not count steps."""
        complete_groups(self, state)
        for own in filter(None, state["state"].values()):
            own.setdefault("step", 0.0)  # only used by learning rate decay, which Apex does not have
        super().__setstate__(state)  # type: ignore[no-untyped-call]
