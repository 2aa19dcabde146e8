"""`apex.optimizers.FusedNovoGrad`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.compat.apex.optimizers.base import ZeroGrad, is_narrow, loss_of, norm_of
from lockstep.errors import InputError

__all__ = ["FusedNovoGrad"]

_ORDERS = {0: float("inf"), 2: 2.0}


class FusedNovoGrad(ZeroGrad, torch.optim.Optimizer):
    """NovoGrad (Ginsburg et al. 2019, arXiv:1905.11286), which torch does not have.

    As Adam, but a gradient is divided by one number per parameter: the running mean of the gradient's
    norm.

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: correct both running means as Adam does.
        betas: decay of the running means of the gradient and of its norm.
        eps: added to the norm.
        weight_decay: added to the update, times the parameter.
        amsgrad: must be False, as in Apex.
        reg_inside_moment: average gradients after dividing by the norm and adding decay, as in the paper; False:
            average first, then divide and add decay.
        grad_averaging: whether new gradients enter the mean with factor 1 - beta; False: with 1.
        norm_type: 2, or 0 for the largest magnitude.
        init_zero: whether the mean of the norm starts at zero; False: at the norm of the first gradient.
        set_grad_none: `zero_grad` sets gradients to None instead of zero.

    Raises:
        InputError: `amsgrad` is True, or the norm is not supported.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise InputError("FusedNovoGrad has no AMSGrad variant, as in Apex")
        if norm_type not in _ORDERS:
            raise InputError(f"norm_type of FusedNovoGrad must be 2 or 0 (the largest magnitude), got {norm_type}")
        self.reg_inside_moment = reg_inside_moment
        self.set_grad_none = set_grad_none
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Raises:
            InputError: the parameters with gradients differ in number from the first step.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            # Steps and norms are stored in the group, as in Apex, so that old checkpoints load.
            group["step"] = group.get("step", 0) + 1
            means = group.setdefault("exp_avg_sq", [None, None])
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            for index, narrow in enumerate((True, False)):
                members = [parameter for parameter in moving if is_narrow(parameter) == narrow]
                means[index] = _blend(means[index], members, group)
                for parameter, norm in zip(members, means[index], strict=True):
                    self._move(parameter, norm.to(parameter.device), group)
        return loss

    def _move(self, parameter: Tensor, norm: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        wide = torch.float32 if is_narrow(parameter) else parameter.dtype
        weight, update, mean = parameter.to(wide), parameter.grad.to(wide), state["exp_avg"].to(wide)
        decay, first, second = group["weight_decay"], 1.0, 1.0
        if group["bias_correction"]:
            first, second = 1 - beta1 ** group["step"], (1 - beta2 ** group["step"]) ** 0.5
        divisor = norm.to(wide) / second + group["eps"]
        if self.reg_inside_moment:
            update = (update / divisor).add_(weight, alpha=decay)
        mean.mul_(beta1).add_(update, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        state["exp_avg"].copy_(mean)
        update = mean / first
        if not self.reg_inside_moment:
            update.div_(divisor).add_(weight, alpha=decay)
        parameter.copy_(weight.sub_(update.mul_(group["lr"])))


def _blend(before: Tensor | None, parameters: Sequence[Tensor], group: dict[str, Any]) -> Tensor:
    """The running means of the norms of gradients, including the current ones: float32, one per parameter."""
    order: int = group["norm_type"]
    beta: float = group["betas"][1]
    found = [norm_of(parameter.grad, _ORDERS[order]) for parameter in parameters if parameter.grad is not None]
    norms = torch.stack([each.to(found[0].device) for each in found]).float() if found else torch.zeros(0)
    if before is None:
        before = torch.zeros_like(norms) if group["init_zero"] else norms
    if before.numel() != norms.numel():
        raise InputError(
            f"FusedNovoGrad: {norms.numel()} parameters of a group have gradients, but {before.numel()} had in the "
            "first step; as in Apex, it must be the same parameters in every step"
        )
    before = before.to(norms)
    if order == 0:
        return beta * before + (1 - beta) * norms
    return (beta * before**2 + (1 - beta) * norms**2).sqrt()
