"""Refuses a model that is wrapped twice: every gradient would be averaged twice, at twice the cost, without a word."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchEngine

from lockstep.drift.engines import is_engine
from lockstep.errors import InputTypeError, ModelError

__all__ = ["NotInsideTorch", "check_module"]

_OURS = "lockstep.DistributedDataParallel"
_TORCHS = "torch.nn.parallel.DistributedDataParallel"
# The files of those who walk over submodules: torch's base class, and its engine.
_WALKERS = frozenset(str(sys.modules[kind.__module__].__file__) for kind in (nn.Module, TorchEngine))


def check_module(module: object) -> None:
    """Refuse what is no module, and a module that contains an engine. Local.

    Raises:
        InputTypeError: no module.
        ModelError: it is one, or one of its submodules is; names both.
    """
    if not isinstance(module, nn.Module):
        raise InputTypeError(f"DistributedDataParallel wraps a torch.nn.Module, got {type(module).__name__}")
    for name, submodule in module.named_modules():
        inner = _name_of(submodule)
        if inner is not None:
            where = f"its submodule {name} is" if name else "it is"
            raise ModelError(
                f"{_OURS} was given {type(module).__name__}, but {where} a {inner} already: its gradients would be "
                "averaged twice. Wrap the bare model once, and train with what that returns"
            )


def _name_of(module: nn.Module) -> str | None:
    if is_engine(module):
        return _OURS
    return _TORCHS if _is_torchs(module) else None


def _is_torchs(module: object) -> bool:
    """Not by `isinstance`, which holds for ours as well."""
    return TorchEngine in type(module).__mro__


class _Reducer:
    """In the place of the C++ object that torch's engine has."""

    def prepare_for_backward(self, outputs: object) -> NoReturn:
        """Refuses to average what was left out by `no_sync()`.

        Raises:
            ModelError: says what to write.
        """
        raise ModelError(
            f"{_OURS} averages in the backward pass of a forward pass that was made outside of no_sync(), and cannot "
            "be told so later. Make the last forward pass of a window outside of no_sync(); for stages of torch's "
            f"pipelines take {_TORCHS}, which runs on this group as well"
        )


@TorchEngine.register
class NotInsideTorch(nn.Module):
    """A module that torch's engine cannot wrap, nor what contains it.

    `isinstance` takes it for torch's engine: by that scripts and libraries tell whether they must take `model.module`.
    Some then use what torch's engine has inside, to let a backward pass average of which the forward pass was made in
    `no_sync()`: torch's pipelines, and Accelerate's `trigger_sync_in_backward`. Here the forward pass decides.

    Attributes:
        require_forward_param_sync: for them; means nothing here.
        reducer: refuses what they ask of it.
    """

    require_forward_param_sync = True
    reducer = _Reducer()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As `torch.nn.Module.named_modules`. Local.

        Raises:
            ModelError: torch's DistributedDataParallel asks, to wrap this one or what contains it.
        """
        _check_not_inside_torch()
        named: Iterator[tuple[str, nn.Module]] = super().named_modules(memo, prefix, remove_duplicate)
        return named


def _check_not_inside_torch() -> None:
    """Refuse to be part of a module that torch's engine is given: it walks over all submodules. Local.

    What it looks for stands right above on the stack, so that anybody else's walk costs a look at one or two frames.

    Raises:
        ModelError: the constructor of torch's DistributedDataParallel asks; names both.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _WALKERS:
        if frame.f_code.co_name == "__init__" and _is_torchs(frame.f_locals.get("self")):
            raise ModelError(
                f"{_TORCHS} was given a module that is or contains a {_OURS}: gradients would be averaged twice. Wrap "
                "the bare model once, and train with what that returns"
            )
        frame = frame.f_back
