"""Excludes functions from compilation by Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

from lockstep.torch_private.lookup import MISSING, resolve
from lockstep.torch_private.table import record_of

__all__ = ["left_out", "untraced"]

_Call = TypeVar("_Call", bound=Callable[..., object])
_EVAL_FRAME = "torch._C._dynamo.eval_frame"


def untraced(call: _Call) -> _Call:
    """The same function, marked by its code object, so that calls have no overhead.

    `torch.compiler.disable`, the substitute if a name is missing, imports the compiler at the first call, and wraps
    each function in another.
    """
    return call if _mark(call, True) else cast(_Call, torch.compiler.disable(call))  # type: ignore[no-untyped-call]


def left_out(with_what_it_calls: bool) -> Callable[[_Call], _Call]:
    """A decorator: Dynamo runs the function uncompiled. Releases that lack the names compile it as well as they can.

    Args:
        with_what_it_calls: also exclude the functions that it calls; otherwise these are compiled.
    """

    def decorate(call: _Call) -> _Call:
        _mark(call, with_what_it_calls)
        return call

    return decorate


def _mark(call: Callable[..., object], with_what_it_calls: bool) -> bool:
    """Mark a function; returns whether this torch supports that."""
    # Without a warning: older releases lack the names, and nothing breaks there.
    names = ("_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy")
    action, strategy, mark = (resolve(record_of(f"{_EVAL_FRAME}.{name}").name) for name in names)
    if MISSING in (action, strategy, mark):
        return False
    mark(call.__code__, strategy(action.SKIP, action.SKIP if with_what_it_calls else action.DEFAULT))
    return True
