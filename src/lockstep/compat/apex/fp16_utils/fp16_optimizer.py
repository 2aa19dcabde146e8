"""`FP16_Optimizer`: an optimizer with float32 masters of 16-bit parameters, and a loss scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lockstep.compat.apex.fp16_utils.fp16util import (
    clip_grad_norm,
    master_params_to_model_params,
    model_grads_to_master_grads,
)
from lockstep.compat.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from lockstep.errors import InputTypeError, LockstepError
from lockstep.torch_private.tensors import foreach_mul_
from lockstep.torch_private.trees import tree_map

__all__ = ["FP16_Module", "FP16_Optimizer", "fp16_to_fp32", "fp32_to_fp16"]

_HALF_DTYPES = (torch.float16, torch.bfloat16)


def fp32_to_fp16(val: Any) -> Any:
    """Convert float32 tensors in `val`, a tensor or lists and tuples of tensors, to float16."""
    return tree_map(lambda leaf: leaf.half() if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf, val)


def fp16_to_fp32(val: Any) -> Any:
    """Convert 16-bit tensors in `val`, a tensor or lists and tuples of tensors, to float32."""
    return tree_map(lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALF_DTYPES else leaf, val)


class FP16_Module(nn.Module):  # noqa: N801 Apex's name
    """A module in float16 that takes and returns float32.

    Args:
        module: changed in place.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module.half()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, with casts of its inputs and outputs."""
        return fp16_to_fp32(self.module(*fp32_to_fp16(inputs), **kwargs))


class FP16_Optimizer:  # noqa: N801 Apex's name
    """Wraps an optimizer some or all of whose parameters have 16 bits.

    The optimizer updates float32 masters of those; `step` copies them into the model. `loss.backward()` becomes
    `optimizer.backward(loss)`.

    Args:
        init_optimizer: any torch optimizer; its groups get the masters.
        static_loss_scale: the loss scale, unless it is dynamic.
        dynamic_loss_scale: adapt the loss scale, and skip steps whose gradients overflow.
        dynamic_loss_args: arguments for `DynamicLossScaler`.
        verbose: print when a step is skipped.

    Attributes:
        optimizer: the wrapped optimizer.
        overflow: whether the last gradients overflowed.
        loss_scale: the current scale, for reading and writing.

    Raises:
        InputTypeError: a parameter is not floating-point.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        for group in init_optimizer.param_groups:
            self._take_over(group)
        # Cast existing state to the masters' dtype.
        init_optimizer.load_state_dict(init_optimizer.state_dict())
        self.dynamic_loss_scale = dynamic_loss_scale
        self.loss_scaler: LossScaler = (
            DynamicLossScaler(**(dynamic_loss_args or {})) if dynamic_loss_scale else LossScaler(static_loss_scale)
        )
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm
        self._is_unscaled = False  # whether gradients of parameters without masters are unscaled

    def _take_over(self, group: dict[str, Any]) -> None:
        halves, masters, others = [], [], []
        for index, parameter in enumerate(group["params"]):
            if not parameter.requires_grad:
                continue
            if not parameter.is_floating_point():
                raise InputTypeError(
                    f"FP16_Optimizer: parameters must be floating-point tensors, got {parameter.dtype}"
                )
            if parameter.dtype not in _HALF_DTYPES:
                others.append(parameter)
                continue
            master = parameter.detach().clone().float().requires_grad_()
            group["params"][index] = master
            if parameter in self.optimizer.state:
                self.optimizer.state[master] = self.optimizer.state.pop(parameter)
            halves.append(parameter)
            masters.append(master)
        self.fp16_groups.append(halves)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append(others)

    def __getstate__(self) -> NoReturn:
        raise LockstepError("FP16_Optimizer cannot be pickled: save its state_dict()")

    def __setstate__(self, state: Any) -> NoReturn:
        raise LockstepError("FP16_Optimizer cannot be unpickled: create a new one and call load_state_dict()")

    def zero_grad(self, set_grads_to_None: bool = True) -> None:  # noqa: N803 Apex's name
        """Clear the gradients of masters, of 16-bit parameters and of the others."""
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)
        for group in self.fp16_groups:
            for parameter in group:
                if parameter.grad is not None:
                    parameter.grad = None if set_grads_to_None else torch.zeros_like(parameter.grad)

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run the backward pass of the scaled loss, and give the masters unscaled gradients.

        Adds to existing gradients, in the model and so in the masters.

        Args:
            loss: the loss; converted to float32 first if it has 16 bits.
            update_master_grads: False leaves out the masters; after the last of several losses call
                `update_master_grads()`.
            retain_graph: keep the graph for another backward pass.
        """
        if self._is_unscaled:
            self._multiply_gradients(self.fp32_from_fp32_groups, self.loss_scale)
            self._is_unscaled = False
        self.loss_scaler.backward(loss.float() if loss.element_size() < 4 else loss, retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Copy gradients to the masters, and divide them by the loss scale, unless they overflowed."""
        if self.dynamic_loss_scale:
            self.overflow = self.loss_scaler.has_overflow(
                parameter
                for groups in (self.fp16_groups, self.fp32_from_fp32_groups)
                for g in groups
                for parameter in g
            )
            if self.overflow:
                return
        for halves, masters in zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True):
            model_grads_to_master_grads(halves, masters)
        self._multiply_gradients((*self.fp32_from_fp16_groups, *self.fp32_from_fp32_groups), 1.0 / self.loss_scale)
        self._is_unscaled = True

    @torch.no_grad()
    def _multiply_gradients(self, groups: Sequence[list[Tensor]], factor: float) -> None:
        gradients = [each.grad for group in groups for each in group if each.grad is not None]
        if gradients and factor != 1.0:
            foreach_mul_(gradients, factor)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> Tensor | int:
        """Clip gradients of masters and of parameters without masters. Returns their norm, or -1 after an overflow."""
        if self.overflow:
            return -1
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return self.clip_grad_norm(parameters, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Unscaled gradients of each group; None after an overflow, when they are meaningless."""
        if self.overflow:
            return None
        return [[parameter.grad for parameter in group["params"]] for group in self.optimizer.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters and copy them to the model; after an overflow, only shrink the loss scale.

        Args:
            closure: computes the loss and calls this object's `backward`; not with a dynamic scale.

        Raises:
            InputTypeError: a closure was passed with a dynamic scale.
        """
        if closure is not None and self.dynamic_loss_scale:
            raise InputTypeError(
                "FP16_Optimizer.step(closure) does not work with a dynamic loss scale, which would have to skip the "
                "step. Use static_loss_scale, or call backward and step without a closure"
            )
        before = self.loss_scale
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            if self.verbose:
                print(f"OVERFLOW! Skipping step. Attempted loss scale: {before}, reducing to {self.loss_scale}")
            return None
        result = self.optimizer.step() if closure is None else self._step_with(closure)
        self._publish()
        return result

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        def published() -> Any:
            # An optimizer that calls the closure again has changed the masters in between.
            if self.first_closure_call_this_step:
                self.first_closure_call_this_step = False
            else:
                self._publish()
            return closure()

        result = self.optimizer.step(published)
        self.first_closure_call_this_step = True
        return result

    def _publish(self) -> None:
        for halves, masters in zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True):
            master_params_to_model_params(halves, masters)

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer, the masters and the loss scale: only tensors and plain values."""
        return {
            "loss_scaler": dict(vars(self.loss_scaler)),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[each.detach() for each in group] for group in self.fp32_from_fp16_groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also one of Apex, whose loss scaler is an object. The model is loaded separately."""
        saved = state_dict["loss_scaler"]
        vars(self.loss_scaler).update(saved if isinstance(saved, dict) else vars(saved))
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for masters, stored in zip(self.fp32_from_fp16_groups, state_dict["fp32_from_fp16"], strict=True):
            for master, value in zip(masters, stored, strict=True):
                master.copy_(value)

    @property
    def loss_scale(self) -> float:
        """The current loss scale."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    @property
    def state(self) -> Any:
        """State of the wrapped optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the wrapped optimizer, for learning rate schedules."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value
