"""`apex.optimizers.FusedLAMB`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.compat.apex.optimizers.base import ZeroGrad, is_narrow, loss_of, norm_of
from lockstep.errors import InputError

__all__ = ["FusedLAMB"]


class FusedLAMB(ZeroGrad, torch.optim.Optimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962), which torch does not have.

    Gradients are first divided by `max(1, norm of all gradients / max_grad_norm)`. Then each parameter moves by `lr`
    times its Adam update (including decay), times the ratio of the norms of parameter and update. 16-bit parameters are
    updated in float32, and rounded once, as in Apex; so are their running means.

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: correct the running means for their initialization at zero.
        betas: decay of the two running means.
        eps: added to the square root in the denominator.
        weight_decay: added to the update, times the parameter.
        amsgrad: must be False, as in Apex.
        adam_w_mode: whether decay is part of the update; False: of the gradient.
        grad_averaging: whether new gradients enter the first mean with factor 1 - beta; False: with 1.
        set_grad_none: `zero_grad` sets gradients to None instead of zero.
        max_grad_norm: see above; 0 for no limit.
        use_nvlamb: whether to use the ratio of norms also for parameters without decay.

    Raises:
        InputError: `amsgrad` is True.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise InputError("FusedLAMB has no AMSGrad variant, as in Apex")
        self.set_grad_none = set_grad_none
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters."""
        loss = loss_of(closure)
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            return loss
        norm = norm_of(torch.stack([norm_of(each).to(gradients[0].device) for each in gradients]))
        for group in self.param_groups:
            limit = group["max_grad_norm"]
            divisor = (norm / limit).clamp(min=1.0) if limit > 0 else torch.ones_like(norm)
            # Kept in the group, as in Apex, so that old checkpoints load.
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group, divisor.to(parameter.device))
        return loss

    def _move(self, parameter: Tensor, group: dict[str, Any], divisor: Tensor) -> None:
        assert parameter.grad is not None
        state, (beta1, beta2), decay = self.state[parameter], group["betas"], group["weight_decay"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        wide = torch.float32 if is_narrow(parameter) else parameter.dtype
        weight, gradient = parameter.to(wide), parameter.grad.to(wide) / divisor
        first_mean, second_mean = state["exp_avg"].to(wide), state["exp_avg_sq"].to(wide)
        if not self.adam_w_mode:
            gradient = gradient + decay * weight
        first_mean.mul_(beta1).add_(gradient, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        second_mean.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first, second = 1.0, 1.0
        if group["bias_correction"]:
            first, second = 1 - beta1 ** group["step"], math.sqrt(1 - beta2 ** group["step"])
        update = (first_mean / first) / (second_mean.sqrt() / second + group["eps"])
        if self.adam_w_mode:
            update = update + decay * weight
        if decay != 0 or self.use_nvlamb:
            size, step = norm_of(weight), norm_of(update)
            update = update * torch.where((size != 0) & (step != 0), size / step, 1.0)
        # Without 16-bit tensors, these are the tensors themselves.
        state["exp_avg"].copy_(first_mean)
        state["exp_avg_sq"].copy_(second_mean)
        parameter.copy_(weight.add_(update, alpha=-group["lr"]))
