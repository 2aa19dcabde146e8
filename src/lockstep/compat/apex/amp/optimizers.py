"""Amp's part of an optimizer: float32 master weights, unscaling of gradients, skipped steps.

[Note: one backward pass] Gradients of a loss are unscaled with that loss's scale, so they must not mix with those
already in `.grad`. `prepare` removes the latter before a backward pass; `finish` divides the new ones and adds the
old again. These are copied, as an engine may keep gradients in buffers that it overwrites in every pass.

[Note: masters] With master weights the optimizer's groups have float32 copies of the 16-bit parameters. These are
created before the first backward pass, not in `initialize`, so that a model checkpoint can be loaded in between. The
optimizer's state is transferred to them; a state loaded by `load_state_dict` before is kept until then, since loading
it for 16-bit parameters rounds it to 16 bits.

[Note: unreduced gradients] An engine adds new gradients to `.grad`, and reduces the sum over ranks. Unscaled gradients
are not in `.grad`, but held back or in the masters. So gradients of a pass without reduction must stay scaled until the
pass with one (`delay_unscale`); otherwise they would never be reduced, and ranks would diverge. Whether a pass reduces
is determined at the end of its block, inside the `no_sync()` that scripts put around it. Horovod's optimizer knows the
number of gradients that it has not reduced: gradients held back then are an error once it has.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.compat.apex.amp._amp_state import AmpError, _amp_state, say
from lockstep.compat.apex.amp.casts import casts_off
from lockstep.compat.apex.amp.properties import HALF_DTYPES
from lockstep.compat.apex.amp.scaler import LossScaler
from lockstep.compat.apex.parallel.distributed import accumulates, look_for_torchs_engines
from lockstep.errors import InputTypeError
from lockstep.torch_private.modules import mark_as_stepped
from lockstep.torch_private.tensors import values_of

__all__ = ["OptimizerState", "process_optimizer"]

_UNREDUCED = (
    "gradients of an earlier backward pass, {where}, were unscaled already: this pass would reduce its own gradients "
    "over ranks, but not those. Pass delay_unscale=True to scale_loss in all passes but the last before a step"
)
_NOT_SYNCHRONIZED = (
    "the master weights have gradients of this rank only: Horovod's optimizer had not reduced those of the model when "
    "the block of scale_loss ended. Call optimizer.synchronize() inside `with "
    "amp.scale_loss(...)`, after backward(), and step() inside `with optimizer.skip_synchronize()`"
)
_NO_CLOSURE = (
    "Amp does not support closures: call backward inside `with amp.scale_loss(...)`, then step() without arguments"
)


class OptimizerState:
    """Amp's state of an optimizer, as its attribute `_amp_stash`.

    Args:
        optimizer: anything with `param_groups`, `state` and torch's methods.
        has_masters: whether to keep master weights; see [Note: masters].

    Attributes:
        params_have_scaled_gradients: whether the last backward pass delayed unscaling.
        skipped_by: number and scaler of the loss whose overflow makes the next step be skipped.
        all_fp16_params: the model's 16-bit parameters; empty without masters.
        all_fp32_from_fp16_params: their masters, in the same order.
    """

    def __init__(self, optimizer: Any, has_masters: bool) -> None:
        self._optimizer = optimizer
        self.has_masters = has_masters
        self.lazy_init_called = False
        self.params_have_scaled_gradients = False
        self.skipped_by: tuple[int, LossScaler] | None = None
        self.all_fp16_params: list[Tensor] = []
        self.all_fp32_from_fp16_params: list[Tensor] = []
        self.loaded_state: dict[Any, Any] | None = None
        self._held: dict[Tensor, Tensor] = {}
        # See [Note: unreduced gradients].
        self._is_unreduced = False  # whether gradients of the last backward pass are local and unscaled
        self._holds_unreduced = False  # the same for earlier gradients, with Horovod's optimizer
        self._are_masters_unreduced = False  # the same for the masters' gradients, with Horovod's optimizer
        self._has_looked_for_engines = False

    def changes_steps(self) -> bool:
        """Whether it affects training, by masters or scaled losses. Local."""
        scalers = _amp_state.loss_scalers
        return self.has_masters or any(each.dynamic or each.loss_scale() != 1.0 for each in scalers)

    # ---- masters -------------------------------------------------------------------------------

    def init_masters(self) -> None:
        """Replace 16-bit parameters by masters, once; does nothing without master weights."""
        if self.lazy_init_called or not self.has_masters:
            return
        self.lazy_init_called = True
        for group in self._optimizer.param_groups:
            group["params"] = self.with_masters(group["params"])
        saved = self._optimizer.state_dict()
        if self.loaded_state is not None:
            saved["state"] = self.loaded_state
            self.loaded_state = None
        # Loading casts state to the dtype of its parameter.
        type(self._optimizer).load_state_dict(self._optimizer, saved)

    def with_masters(self, parameters: list[Tensor]) -> list[Tensor]:
        """The parameters, with new masters in place of trained 16-bit ones."""
        return [self._master_of(each) if each.requires_grad and _is_half(each) else each for each in parameters]

    def _master_of(self, parameter: Tensor) -> Tensor:
        master = parameter.detach().clone().float().requires_grad_()
        self.all_fp16_params.append(parameter)
        self.all_fp32_from_fp16_params.append(master)
        state = self._optimizer.state
        if parameter in state:
            state[master] = state.pop(parameter)
        return master

    def _own_params(self) -> Iterator[Tensor]:
        """Parameters other than masters, whose `.grad` backward passes write and the optimizer reads."""
        masters = {id(master) for master in self.all_fp32_from_fp16_params}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in masters:
                    yield parameter

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """With masters, the parameters that do not need any."""
        return list(self._own_params()) if self.has_masters else []

    # ---- one backward pass ---------------------------------------------------------------------

    def prepare(self) -> None:
        """Remove earlier gradients before those of a loss; see [Note: one backward pass].

        Raises:
            AmpError: gradients of an earlier pass without reduction would never be reduced.
        """
        self.init_masters()
        self._check_reduced()
        self._holds_unreduced = self.num_unreduced() > 0
        for parameter in self.all_fp16_params:
            parameter.grad = None  # its master has the earlier gradient
        for parameter in self._own_params():
            if parameter.grad is not None:
                self._held[parameter] = parameter.grad.clone()
                parameter.grad = None

    def undo(self) -> None:
        """Instead of `finish`, after an error in the pass: restore what `prepare` removed."""
        for parameter in self.all_fp16_params:
            parameter.grad = None
        for parameter in self._own_params():
            parameter.grad = self._held.get(parameter)
        self._held.clear()

    def num_unreduced(self) -> int:
        """Number of gradients that Horovod's optimizer has yet to reduce; 0 for every other optimizer. Local."""
        found: int = getattr(self._optimizer, "num_unreduced", 0)
        return found

    def _accumulates(self) -> bool:
        if not self._has_looked_for_engines and dist.is_available() and dist.is_initialized():
            self._has_looked_for_engines = True
            look_for_torchs_engines()
        return accumulates([*self._own_params(), *self.all_fp16_params])

    def _check_reduced(self) -> None:
        """See [Note: unreduced gradients]."""
        if not self._is_unreduced or self._accumulates():
            return
        self._is_unreduced = False
        there = (*self._own_params(), *self.all_fp32_from_fp16_params)
        if any(_has_values(each.grad) for each in there):
            raise AmpError(_UNREDUCED.format(where="under disable_allreduce() or no_sync()"))

    def _check_synchronized(self) -> None:
        """See [Note: unreduced gradients]."""
        holds, self._holds_unreduced = self._holds_unreduced, False
        if not holds or self.num_unreduced() > 0:
            return
        there = (*self._held.values(), *(each.grad for each in self.all_fp32_from_fp16_params))
        if any(map(_has_values, there)):
            raise AmpError(_UNREDUCED.format(where="which Horovod's optimizer did not reduce"))

    def check_masters(self) -> None:
        """Before a step: check that masters have the reduced gradients. See [Note: unreduced gradients].

        Raises:
            AmpError: it reduces in this step, or has reduced after the masters got theirs.
        """
        is_open = self.num_unreduced() > 0
        if is_open and self.has_masters and self._optimizer.synchronizes_at_step():
            raise AmpError(_NOT_SYNCHRONIZED)
        if self._are_masters_unreduced and not is_open:
            raise AmpError(_NOT_SYNCHRONIZED)

    def finish(self, scaler: LossScaler) -> None:
        """Unscale the gradients of a backward pass, and add the earlier ones.

        Raises:
            AmpError: the earlier ones would never be reduced over ranks.
        """
        self.init_masters()
        self._check_synchronized()
        self._is_unreduced = self._accumulates()
        self._are_masters_unreduced = self.has_masters and self.num_unreduced() > 0
        pairs = [
            (master, model.grad)
            for model, master in zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True)
            if model.grad is not None
        ]
        for (master, _), wide in zip(pairs, scaler.unscale([grad for _, grad in pairs]), strict=True):
            master.grad = wide if master.grad is None else master.grad.add_(wide)
        own = [parameter for parameter in self._own_params() if parameter.grad is not None]
        for parameter, wide in zip(own, scaler.unscale([_dense(each) for each in own]), strict=True):
            self._put_gradient(parameter, wide)
        for parameter, held in self._held.items():  # those without a gradient of this loss
            parameter.grad = held
        self._held.clear()

    def _put_gradient(self, parameter: Tensor, wide: Tensor) -> None:
        held = self._held.pop(parameter, None)
        assert parameter.grad is not None
        if not parameter.grad.is_sparse:
            if held is not None:
                wide = wide.add_(held)
            if wide is not parameter.grad:
                parameter.grad.copy_(wide)
            return
        values_of(parameter.grad).copy_(wide)
        if held is not None:
            parameter.grad = parameter.grad + held

    def skip(self) -> None:
        """Instead of a step: print that it is skipped, and clear gradients that nothing else would."""
        assert self.skipped_by is not None
        loss_id, scaler = self.skipped_by
        say(
            f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scaler.loss_scale()}",
        )
        self.skipped_by = None
        self.clear_master_gradients()

    def clear_master_gradients(self) -> None:
        """Clear gradients of masters, which `model.zero_grad()` does not."""
        self._are_masters_unreduced = False
        for master in self.all_fp32_from_fp16_params:
            master.grad = None

    @torch.no_grad()
    def publish_masters(self) -> None:
        """Copy the masters, rounded, to the model."""
        for model, master in zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True):
            model.copy_(master)


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in HALF_DTYPES


def _has_values(gradient: Tensor | None) -> bool:
    """Whether there is a gradient, other than the zeros of `zero_grad(set_to_none=False)`."""
    if gradient is None:
        return False
    return bool((values_of(gradient.coalesce()) if gradient.is_sparse else gradient).any())


def _dense(parameter: Tensor) -> Tensor:
    """The gradient, or the values of a sparse one."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return values_of(parameter.grad)


def process_optimizer(optimizer: Any, has_masters: bool) -> None:
    """Give an optimizer its `_amp_stash`, and methods that use it. It stays the same object.

    Raises:
        AmpError: it has a stash already.
    """
    if hasattr(optimizer, "_amp_stash"):
        raise AmpError(
            "this optimizer was passed to amp.initialize before; pass each once, and all models and optimizers in "
            "the same call"
        )
    stash = OptimizerState(optimizer, has_masters)
    optimizer._amp_stash = stash
    # Scripts call these before they load a checkpoint.
    optimizer._amp_lazy_init = optimizer._lazy_init_maybe_master_weights = stash.init_masters
    optimizer._prepare_amp_backward = stash.prepare
    optimizer._post_amp_backward = stash.finish
    # Bound methods, because learning rate schedulers read their attributes.
    optimizer.step = types.MethodType(_make_step(optimizer.step), optimizer)
    if has_masters:
        optimizer.zero_grad = types.MethodType(_zero_grad, optimizer)
        optimizer.add_param_group = types.MethodType(_make_add_param_group(optimizer.add_param_group), optimizer)
        optimizer.load_state_dict = types.MethodType(_make_load_state_dict(optimizer.load_state_dict), optimizer)


def _make_step(plain_step: Any) -> Any:
    def step(self: Any, closure: Any = None, **kwargs: Any) -> Any:
        stash = self._amp_stash
        stash._is_unreduced = False
        if closure is not None and (stash.has_masters or stash.skipped_by is not None):
            raise AmpError(_NO_CLOSURE)
        if stash.skipped_by is not None:
            stash.skip()
            # So that schedulers do not warn about a forgotten step.
            mark_as_stepped(getattr(self, "optim", self))
            return None
        stash.init_masters()
        stash.check_masters()
        with casts_off():
            result = plain_step(**kwargs) if closure is None else plain_step(closure, **kwargs)
        if stash.has_masters:
            stash.publish_masters()
            stash.clear_master_gradients()
        return result

    # Including attributes set by schedulers that were created before.
    vars(step).update(getattr(plain_step, "__dict__", {}))
    return step


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    stash = self._amp_stash
    stash.init_masters()
    for parameter in (*stash.all_fp16_params, *stash.all_fp32_from_fp32_params):
        if parameter.grad is None:
            continue
        if set_to_none:
            parameter.grad = None
        else:
            parameter.grad = torch.zeros_like(parameter.grad)
    stash.clear_master_gradients()


def _make_add_param_group(plain: Any) -> Any:
    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        stash = self._amp_stash
        stash.init_masters()
        parameters = param_group["params"]
        if isinstance(parameters, set):
            raise InputTypeError("the parameters of a group must be ordered, got a set; give a list")
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        param_group["params"] = stash.with_masters(listed)
        plain(param_group)

    return add_param_group


def _make_load_state_dict(plain: Any) -> Any:
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        plain(state_dict)
        if not self._amp_stash.lazy_init_called:
            self._amp_stash.loaded_state = dict(state_dict["state"])

    return load_state_dict
