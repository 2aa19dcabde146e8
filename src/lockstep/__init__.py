"""Lockstep: synchronous data-parallel training for PyTorch. N processes, one answer.

Public names are resolved on first use, so that `import lockstep.launch` (the launcher)
does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lockstep.data import DataLoader
    from lockstep.errors import LockstepError
    from lockstep.launch.spawn import spawn
    from lockstep.parallel.distributed import DistributedDataParallel
    from lockstep.world import World, current_world, init, symmetric_empty

# Public name -> the module that defines it. A subpackage stands for itself.
_PUBLIC = {
    "DataLoader": "lockstep.data",
    "DistributedDataParallel": "lockstep.parallel.distributed",
    "LockstepError": "lockstep.errors",
    "World": "lockstep.world",
    "current_world": "lockstep.world",
    "errors": "lockstep.errors",
    "init": "lockstep.world",
    "metrics": "lockstep.metrics",
    "spawn": "lockstep.launch.spawn",
    "symmetric_empty": "lockstep.world",
    "testing": "lockstep.testing",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    module_name = _PUBLIC.get(name)
    if module_name is None:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    module = importlib.import_module(module_name)
    value = module if module_name == f"lockstep.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
