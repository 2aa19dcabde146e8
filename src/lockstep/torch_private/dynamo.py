"""Functions that Dynamo runs as they are, inside of what it compiles."""

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
    """The same function, marked by its code object, which costs a call nothing.

    `torch.compiler.disable`, which stands in where a name is missing, imports the compiler at the first call, and
    puts a function around each.
    """
    return call if _mark(call, True) else cast(_Call, torch.compiler.disable(call))  # type: ignore[no-untyped-call]


def left_out(with_what_it_calls: bool) -> Callable[[_Call], _Call]:
    """A decorator: Dynamo runs the function as it is. Releases that lack the names compile it as well as they can.

    Args:
        with_what_it_calls: and what it calls, too; else that is compiled, as if it were called from outside.
    """

    def decorate(call: _Call) -> _Call:
        _mark(call, with_what_it_calls)
        return call

    return decorate


def _mark(call: Callable[..., object], with_what_it_calls: bool) -> bool:
    """Whether this torch can be told."""
    # Without a warning: older releases lack the names, and nothing is off there.
    names = ("_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy")
    action, strategy, mark = (resolve(record_of(f"{_EVAL_FRAME}.{name}").name) for name in names)
    if MISSING in (action, strategy, mark):
        return False
    mark(call.__code__, strategy(action.SKIP, action.SKIP if with_what_it_calls else action.DEFAULT))
    return True
