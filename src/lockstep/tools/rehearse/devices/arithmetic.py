"""Refuses `cuda + cpu`, and losses that are computed by it, where the user's code writes them.

Not in the mode, as other operators: functions in C++ make tensors on the way without a mark, as `torch.stft` does its
window, and compute with them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from lockstep.comm.callsite import is_users
from lockstep.tools.rehearse.devices.marks import mark_of
from lockstep.tools.rehearse.devices.mode import check_one_device, is_checked
from lockstep.tools.rehearse.patching import wrap

__all__ = ["install"]

_OPERATORS = tuple(f"__{kind}{name}__" for name in ("add", "sub", "mul", "truediv") for kind in ("", "r", "i"))
# Tensors that are what they seem to be: no fake ones, nor those of subclasses.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _check(name: str, one: Any, other: Any) -> None:
    first, second = mark_of(one), mark_of(other)
    index = second if first is None else first
    if first == second or index is None or not is_checked():
        return
    if torch._C._functorch.peek_interpreter_stack() is None:  # what vmap computes with has no memory of its own
        check_one_device(name.strip("_"), (one, other), index)


def _arithmetic(original: Callable[..., Any]) -> Callable[..., Any]:
    name = original.__name__

    def compute(self: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) in _PLAIN and type(other) in _PLAIN and _is_by_user(sys._getframe(1)):
            _check(name, self, other)
        return original(self, other, *args, **kwargs)

    return compute


def _is_by_user(frame: Any) -> bool:
    # Losses are called by torch's modules.
    return is_users(frame.f_code) or frame.f_globals.get("__name__") == "torch.nn.functional"


def install() -> None:
    """Replace the operators of tensors."""
    for name in _OPERATORS:
        wrap(torch.Tensor, name, _arithmetic)
    wrap(torch._C._nn, "l1_loss", _arithmetic)
