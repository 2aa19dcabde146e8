"""Rejects `cuda + cpu`, and losses computed that way, if the user's code calls them.

Unlike other operators these are not checked in the mode, because functions in C++ compute with unmarked temporary
tensors, such as the window of `torch.stft`.
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
# Only plain tensors are checked: no fake tensors, and no subclasses.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _check(name: str, one: Any, other: Any) -> None:
    first, second = mark_of(one), mark_of(other)
    index = second if first is None else first
    if first == second or index is None or not is_checked():
        return
    if torch._C._functorch.peek_interpreter_stack() is None:  # tensors under vmap have no storage to mark
        check_one_device(name.strip("_"), (one, other), index)


def _arithmetic(original: Callable[..., Any]) -> Callable[..., Any]:
    name = original.__name__

    def compute(self: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) in _PLAIN and type(other) in _PLAIN and _is_by_user(sys._getframe(1)):
            _check(name, self, other)
        return original(self, other, *args, **kwargs)

    return compute


def _is_by_user(frame: Any) -> bool:
    # Modules for losses call these functions from torch.nn.functional.
    return is_users(frame.f_code) or frame.f_globals.get("__name__") == "torch.nn.functional"


def install() -> None:
    """Replace the arithmetic operators of tensors, and the L1 loss."""
    for name in _OPERATORS:
        wrap(torch.Tensor, name, _arithmetic)
    wrap(torch._C._nn, "l1_loss", _arithmetic)
