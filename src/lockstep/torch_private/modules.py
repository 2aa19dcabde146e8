"""Internals of `nn.Module`, base classes of torch's own layers, and the parts of `nn.DataParallel`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.torch_private.lookup import find, need

if TYPE_CHECKING:
    import torch
    from torch._utils import ExceptionWrapper as ExceptionWrapper
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.nn.parallel._functions import Gather as Gather
    from torch.nn.parallel._functions import Scatter as Scatter
else:
    ExceptionWrapper = need("torch._utils.ExceptionWrapper")
    BatchNorm = find("torch.nn.modules.batchnorm._BatchNorm") or nn.BatchNorm1d.__base__
    Gather = need("torch.nn.parallel._functions.Gather")
    Scatter = need("torch.nn.parallel._functions.Scatter")

__all__ = [
    "REPLICATE",
    "BatchNorm",
    "ExceptionWrapper",
    "Gather",
    "Scatter",
    "buffers_of",
    "children_of",
    "copy_by_class",
    "copy_for_replica",
    "mark_as_stepped",
    "parameters_of",
]

REPLICATE = "_replicate_for_data_parallel"
"""The method of a module that `nn.DataParallel` calls for each replica."""

_replicate = need("torch.nn.Module._replicate_for_data_parallel")


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's own dict of children, which callers may change; it includes repeated children and None."""
    return module._modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own dict of parameters."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own dict of buffers."""
    return module._buffers


def copy_for_replica(module: nn.Module) -> nn.Module:
    """A copy of a module without parameters, by its own method if it has one."""
    copy: nn.Module = getattr(module, REPLICATE, functools.partial(_replicate, module))()
    return copy


def copy_by_class(module: nn.Module) -> nn.Module:
    """The same by the method of its class, even if an attribute of the module replaces that."""
    copy: nn.Module = getattr(type(module), REPLICATE, _replicate)(module)
    return copy


def mark_as_stepped(optimizer: Any) -> None:
    """Make learning rate schedulers treat a skipped step of the optimizer as done."""
    optimizer._opt_called = True
