"""Casts the inputs and outputs of a 16-bit model, and its state_dict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.torch_private.modules import REPLICATE, buffers_of, copy_by_class, parameters_of
from lockstep.tree import map_tensors

__all__ = ["CastForward", "keep_state_dict_wide"]


class CastForward:
    """Replaces `module.forward`, and casts floating-point inputs and outputs.

    An object rather than a closure, so that a copy of the module gets one that runs the copy, and modules
    can be pickled.

    Args:
        module: the module whose forward pass runs.
        inputs: dtype of floating-point inputs; None leaves them alone.
        outputs: dtype of floating-point outputs; None leaves them alone.
    """

    def __init__(self, module: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
        self._module = module
        # The forward that a script may have set on the module.
        self._replaced = vars(module).get("forward")
        self._inputs = inputs
        self._outputs = outputs

    def install(self) -> None:
        """Replace the `forward` of the module, and of its replicas in `DataParallel`."""
        vars(self._module).update({"forward": self, REPLICATE: self._replicate})

    def _replicate(self) -> nn.Module:
        replica: nn.Module = copy_by_class(self._module)
        del vars(replica)[REPLICATE]
        vars(replica)["forward"] = self._replaced
        if self._replaced is None:
            del vars(replica)["forward"]
        CastForward(replica, self._inputs, self._outputs).install()
        return replica

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass."""
        if self._inputs is not None:
            args, kwargs = _cast((args, kwargs), self._inputs)
        if self._replaced is not None:
            output = self._replaced(*args, **kwargs)
        else:
            output = type(self._module).forward(self._module, *args, **kwargs)
        return output if self._outputs is None else _cast(output, self._outputs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def keep_state_dict_wide(model: nn.Module) -> None:
    """Make `state_dict` return 16-bit parameters and buffers as float32, so that checkpoints fit every opt level."""
    for module in model.modules():
        module.register_state_dict_post_hook(_widen)  # type: ignore[no-untyped-call]


def _widen(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    for name in (*parameters_of(module), *buffers_of(module)):
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.is_floating_point() and value.element_size() < 4:
            state_dict[prefix + name] = value.float()
