"""Refuses a model that is wrapped twice: every gradient would be averaged twice, at twice the cost, without a word."""

from __future__ import annotations

from typing import NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchEngine

from lockstep.drift.engines import is_engine
from lockstep.errors import InputTypeError, ModelError

__all__ = ["PassesForTorchs", "check_module"]

_OURS = "lockstep.DistributedDataParallel"
_TORCHS = "torch.nn.parallel.DistributedDataParallel"


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
class PassesForTorchs(nn.Module):
    """A module that passes for torch's engine.

    `isinstance` takes it for torch's engine: by that scripts and libraries tell whether they must take `model.module`.
    Some then use what torch's engine has inside, to let a backward pass average of which the forward pass was made in
    `no_sync()`: torch's pipelines, and Accelerate's `trigger_sync_in_backward`. Here the forward pass decides.

    Attributes:
        require_forward_param_sync: for them; means nothing here.
        reducer: refuses what they ask of it.
    """

    require_forward_param_sync = True
    reducer = _Reducer()
