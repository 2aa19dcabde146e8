"""`apex.optimizers.FusedSGD`."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.compat.apex.optimizers.base import ZeroGrad
from lockstep.errors import InputError

__all__ = ["FusedSGD"]


class FusedSGD(ZeroGrad, torch.optim.SGD):
    """`torch.optim.SGD`.

    Args:
        params: parameters or groups.
        lr: learning rate.
        momentum: as for `torch.optim.SGD`.
        dampening: as for `torch.optim.SGD`.
        weight_decay: see torch.
        nesterov: as for `torch.optim.SGD`.
        wd_after_momentum: must be False.
        materialize_master_grads: no effect; gradients of master weights are always materialized.
        set_grad_none: `zero_grad` sets gradients to None instead of zero.

    Raises:
        InputError: `wd_after_momentum` is True.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        del materialize_master_grads
        if wd_after_momentum:
            raise InputError(
                "FusedSGD(wd_after_momentum=True) is not supported: torch's SGD applies decay before momentum"
            )
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
