"""`apex.optimizers.FusedAdam`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.compat.apex.optimizers.base import ZeroGrad, complete_groups, is_narrow, loss_of
from lockstep.errors import InputError

__all__ = ["FusedAdam"]

# Adam in older torch only adds weight decay to the gradient; AdamW's decay is applied here.
_DECOUPLED = "decoupled_weight_decay"
_ADAM_DECOUPLES = _DECOUPLED in inspect.signature(torch.optim.Adam).parameters
_WIDE = ("exp_avg", "exp_avg_sq", "master")  # what is float32 where the parameter has 16 bits


class FusedAdam(ZeroGrad, torch.optim.Adam):
    """`torch.optim.AdamW`, or Adam with `adam_w_mode=False`; in float32, running means too, for 16-bit parameters.

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: correct the running means for their initialization at zero, as torch does.
        betas: decay of the two running means.
        eps: added to the square root in the denominator.
        adam_w_mode: whether weight decay is decoupled.
        weight_decay: factor of weight decay.
        amsgrad: must be False, as in Apex.
        set_grad_none: `zero_grad` sets gradients to None instead of zero.
        capturable: for CUDA graphs; `torch.amp.GradScaler` takes gradients of 16 bits, too.
        master_weights: update float32 copies of 16-bit parameters, kept in the state; needs `capturable`, as in Apex.
        max_grad_norm: clip each group's gradients to this norm, as Apex did until 2019; 0 for no limit.

    Raises:
        InputError: an argument is not supported.
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
            raise InputError("FusedAdam has no AMSGrad variant, as in Apex: use torch.optim.AdamW(amsgrad=True)")
        if master_weights and not capturable:
            raise InputError("FusedAdam(master_weights=True) needs capturable=True, as in Apex")
        self.set_grad_none = set_grad_none
        self.adam_w_mode = adam_w_mode
        self.bias_correction = bias_correction
        self.max_grad_norm = max_grad_norm
        self.master_weights = master_weights
        self.capturable = self._step_supports_amp_scaling = capturable
        decoupled = {"decoupled_weight_decay": adam_w_mode} if _ADAM_DECOUPLES else {}
        super().__init__(params, lr, betas, eps, weight_decay, capturable=capturable, **decoupled)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also accepts checkpoints of Apex, which count steps per group, and of torch's AdamW."""
        defaults = complete_groups(self, state)
        for group in state["param_groups"]:
            if _ADAM_DECOUPLES:
                # As in Apex, the optimizer decides between the two, not the checkpoint.
                group[_DECOUPLED] = defaults[_DECOUPLED]
            step = group.pop("step", 0)
            for own in (state["state"].get(parameter) for parameter in group["params"]):
                if own:
                    own.setdefault("step", float(step))
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, with the state of 16-bit parameters in float32."""
        super().load_state_dict(state_dict)
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for number, parameter in zip(numbers, self._parameters(), strict=True):
            saved = state_dict["state"].get(number)
            if saved and is_narrow(parameter):  # torch has rounded them to the parameter's dtype
                for name in saved.keys() & set(_WIDE):
                    self.state[parameter][name] = saved[name].to(parameter.device, torch.float32, copy=True)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, unless a GradScaler has found infinite gradients."""
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            return None
        takes_off = self.adam_w_mode and not _ADAM_DECOUPLES
        by_hand = not self.bias_correction or found_inf is not None or any(map(self._is_ours, self._parameters()))
        if self.max_grad_norm <= 0 and not by_hand and not takes_off:
            return super().step(closure)
        loss = loss_of(closure)
        if self.max_grad_norm > 0:
            for group in self.param_groups:
                torch.nn.utils.clip_grad_norm_(group["params"], self.max_grad_norm * (1.0 if scale is None else scale))
        if by_hand:
            self._step_by_hand(scale)
        elif takes_off:
            self._step_decoupled()
        else:
            super().step()
        return loss

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _is_ours(self, parameter: Tensor) -> bool:
        """Whether torch's Adam computes this parameter in 16 bits, or refuses it: it is capturable on GPUs only."""
        return is_narrow(parameter) or (self.capturable and parameter.is_cpu)

    @torch.no_grad()
    def _step_decoupled(self) -> None:
        """A step of AdamW: apply the decay, then run torch's Adam without decay."""
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
    def _step_by_hand(self, scale: Tensor | None) -> None:
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                self._move(parameter, group, scale)

    def _move(self, parameter: Tensor, group: dict[str, Any], scale: Tensor | None) -> None:
        """A step as in Apex's kernel; torch always corrects the bias, and computes in 16 bits for 16-bit parameters."""
        assert parameter.grad is not None
        state, (beta1, beta2), decay = self.state[parameter], group["betas"], group["weight_decay"]
        wide = torch.float32 if is_narrow(parameter) else parameter.dtype
        if not state:
            state["step"] = torch.zeros((), device=parameter.device if group["capturable"] else "cpu")
            state["exp_avg"] = torch.zeros_like(parameter, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=wide)
        state["step"] += 1
        weight, gradient = parameter.to(wide), parameter.grad.to(wide)
        if self.master_weights and is_narrow(parameter):
            weight = state.setdefault("master", weight)
        if scale is not None:  # unscaled gradients may be 0 in 16 bits
            gradient = gradient / scale
            parameter.grad.copy_(gradient)
        if decay and not self.adam_w_mode:
            gradient = gradient + decay * weight
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first: Any = 1.0
        second: Any = 1.0
        if self.bias_correction:
            # A captured graph must read the step each time.
            step = state["step"].double() if group["capturable"] else float(state["step"])
            first, second = 1 - beta1**step, 1 - beta2**step
        update = (state["exp_avg"] / first) / ((state["exp_avg_sq"] / second).sqrt() + group["eps"])
        if self.adam_w_mode:
            update = update + decay * weight
        parameter.copy_(weight.sub_(group["lr"] * update))
