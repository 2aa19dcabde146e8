"""Apex's fused optimizers: torch's own, which have been fused or horizontally batched since torch 2."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import InputError
from lockstep.torch_private.tensors import foreach_norm

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedSGD"]

# The Adam of older torch only adds the weight decay to the gradient; that of AdamW is taken off here.
_ADAM_DECOUPLES = "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters


class _ZeroGrad:
    """`set_grad_none` of Apex, as the default of torch's `set_to_none`."""

    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients: to None if `set_grad_none`, else to zeros."""
        chosen = self.set_grad_none if set_to_none is None else set_to_none
        super().zero_grad(chosen)  # type: ignore[misc]


class FusedAdam(_ZeroGrad, torch.optim.Adam):
    """`torch.optim.AdamW`, or Adam with `adam_w_mode=False`.

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: correct the running means for their start at zero, as torch does.
        betas: decay of the two running means.
        eps: added to the square root in the denominator.
        adam_w_mode: decoupled weight decay.
        weight_decay: see above.
        amsgrad: must be False, as in Apex.
        set_grad_none: `zero_grad` sets gradients to None instead of zero.
        capturable: for CUDA graphs.
        master_weights: must be False; `amp.initialize(opt_level="O2")` keeps masters.
        max_grad_norm: clip each group's gradients to this norm, as Apex did until 2019; 0 for no limit.

    Raises:
        InputError: an argument that is not supported.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        max_grad_norm: float = 0.0,
    ) -> None:
        if amsgrad:
            raise InputError("FusedAdam has no AMSGrad variant, here as in Apex: use torch.optim.AdamW(amsgrad=True)")
        if master_weights:
            raise InputError('FusedAdam(master_weights=True) is not supported: amp.initialize(opt_level="O2") has them')
        self.set_grad_none = set_grad_none
        self.adam_w_mode = adam_w_mode
        self.bias_correction = bias_correction
        self.max_grad_norm = max_grad_norm
        decoupled = {"decoupled_weight_decay": adam_w_mode} if _ADAM_DECOUPLES else {}
        super().__init__(params, lr, betas, eps, weight_decay, capturable=capturable, **decoupled)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        takes_off = self.adam_w_mode and not _ADAM_DECOUPLES
        if self.max_grad_norm <= 0 and self.bias_correction and not takes_off:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.max_grad_norm > 0:
            for group in self.param_groups:
                torch.nn.utils.clip_grad_norm_(group["params"], self.max_grad_norm)
        if not self.bias_correction:
            self._step_uncorrected()
        elif takes_off:
            self._step_decoupled()
        else:
            super().step()
        return loss

    @torch.no_grad()
    def _step_decoupled(self) -> None:
        """A step of AdamW by torch's Adam, which is told of no decay."""
        decays = [group["weight_decay"] for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = 0.0
                for parameter in (each for each in group["params"] if each.grad is not None):
                    parameter.mul_(1 - group["lr"] * decay)
            super().step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    @torch.no_grad()
    def _step_uncorrected(self) -> None:
        # torch's Adam always corrects. The state is the same.
        for group in self.param_groups:
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            for parameter in (each for each in group["params"] if each.grad is not None):
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                if self.adam_w_mode:
                    parameter.mul_(1 - group["lr"] * decay)
                elif decay:
                    gradient = gradient + decay * parameter
                state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                root = state["exp_avg_sq"].sqrt().add_(group["eps"])
                parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"])


class FusedSGD(_ZeroGrad, torch.optim.SGD):
    """`torch.optim.SGD`.

    Args:
        params: parameters or groups.
        lr: learning rate.
        momentum: as for `torch.optim.SGD`.
        dampening: as for `torch.optim.SGD`.
        weight_decay: see torch.
        nesterov: as for `torch.optim.SGD`.
        wd_after_momentum: must be False.
        materialize_master_grads: no effect: the gradients of master weights are always there.
        set_grad_none: `zero_grad` sets gradients to None instead of zero.

    Raises:
        InputError: `wd_after_momentum`.
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
            raise InputError("FusedSGD(wd_after_momentum=True) is not supported: torch's SGD decays before momentum")
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


class FusedAdagrad(_ZeroGrad, torch.optim.Adagrad):
    """`torch.optim.Adagrad`.

    Args:
        params: parameters or groups.
        lr: learning rate.
        eps: added to the square root in the denominator.
        weight_decay: see torch.
        set_grad_none: `zero_grad` sets gradients to None instead of zero.
        adagrad_w_mode: must be False.

    Raises:
        InputError: `adagrad_w_mode`.
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


class FusedLAMB(_ZeroGrad, torch.optim.Optimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962), which torch does not have; made of torch's foreach operations.

    Gradients are first divided by `max(1, norm of all gradients / max_grad_norm)`. Then each parameter moves by `lr`
    times its Adam update (decay included), times the ratio of the norms of parameter and update.

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: correct the running means for their start at zero.
        betas: decay of the two running means.
        eps: added to the square root in the denominator.
        weight_decay: added to the update, times the parameter.
        amsgrad: must be False, as in Apex.
        adam_w_mode: decay is part of the update; False: of the gradient.
        grad_averaging: new gradients enter the first mean with 1 - beta; False: with 1.
        set_grad_none: `zero_grad` sets gradients to None instead of zero.
        max_grad_norm: see above; 0 for no limit.
        use_nvlamb: use the ratio of norms for parameters without decay too.

    Raises:
        InputError: `amsgrad`.
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
            raise InputError("FusedLAMB has no AMSGrad variant, here as in Apex")
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
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            return loss
        norms = foreach_norm([each.float() for each in gradients])
        norm = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))
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
        gradient = parameter.grad / divisor
        if not self.adam_w_mode:
            gradient = gradient + decay * parameter
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first, second = 1.0, 1.0
        if group["bias_correction"]:
            first, second = 1 - beta1 ** group["step"], math.sqrt(1 - beta2 ** group["step"])
        update = (state["exp_avg"] / first) / (state["exp_avg_sq"].sqrt() / second + group["eps"])
        if self.adam_w_mode:
            update = update + decay * parameter
        if decay != 0 or self.use_nvlamb:
            size, step = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(update)
            update = update * torch.where((size != 0) & (step != 0), size / step, 1.0)
        parameter.add_(update, alpha=-group["lr"])
