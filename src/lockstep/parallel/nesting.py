"""A model wrapped twice: every gradient would be averaged twice, at twice the cost, without a word."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import nn

from lockstep.drift import is_engine
from lockstep.errors import ModelError

__all__ = ["check_not_inside_torch", "check_not_nested"]

_OURS = "lockstep.DistributedDataParallel"
_TORCHS = "torch.nn.parallel.DistributedDataParallel"
_FORWARD = torch.nn.parallel.DistributedDataParallel.forward.__code__


def check_not_nested(module: nn.Module) -> None:
    """Refuse a module that contains an engine. Local.

    Raises:
        ModelError: it is one, or one of its submodules is; names both.
    """
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
    return _TORCHS if isinstance(module, torch.nn.parallel.DistributedDataParallel) else None


def check_not_inside_torch(engine: nn.Module) -> None:
    """Refuse to run inside of torch's engine: looks whose forward pass this one is called from. Local.

    Raises:
        ModelError: torch's DistributedDataParallel stands around this one; names both.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FORWARD and any(each is engine for each in frame.f_locals["self"].modules()):
            raise ModelError(
                f"{_TORCHS} stands around a {_OURS}: gradients would be averaged twice. Wrap the bare model once, and "
                "train with what that returns"
            )
        frame = frame.f_back
