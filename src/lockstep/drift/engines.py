"""The engines of this process.

[Note: engines that are gone] An engine that is part of a reference cycle lives until the garbage collector runs, which
happens at different times on each rank. So no collective may be called merely because an engine still exists: only its
own passes call collectives. `comparison.py` describes how it is handled when the world is left.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from lockstep.torch_private.autograd import version_of

__all__ = ["AveragingModule", "engines", "note_engine", "num_writes", "parameters_of"]

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


class AveragingModule(Protocol):
    """The interface of an engine, which averages the gradients of its module's parameters over a group.

    Attributes:
        module: the model.
        process_group: the ranks that average.
        number: number among the engines over this group, which all of its ranks create in the same order; negative for
            a copy, which a rank may make alone.
    """

    module: torch.nn.Module
    process_group: dist.ProcessGroup
    number: int

    def pre_step(self, optimizer: Optimizer, arguments: StepArguments) -> StepArguments | None:
        """Called when an optimizer is about to step. Local.

        Returns:
            None if the engine averages none of its parameters; else the arguments to call `step` with.
        """

    def check_unread(self) -> None:
        """Raise if an unread comparison shows that ranks averaged gradients of different batches. Local."""

    @property
    def has_averaged(self) -> bool:
        """Whether it has averaged anything since it was created. Local."""

    def tensors_alike(self) -> Mapping[str, torch.Tensor]:
        """The tensors, by name, that must be equal on all ranks when training is over. Local."""


_WRITES_BEFORE = "_writes_before"  # attribute of an engine: number of writes to the parameters before its creation
# Replaced with each new engine; dead entries stay until then. Every step reads it, and it is faster than a WeakSet.
_engines: list[weakref.ref[Any]] = []
_engines_lock = threading.Lock()  # ranks may be threads


def note_engine(engine: AveragingModule) -> None:
    """Register an engine. Local."""
    global _engines
    vars(engine)[_WRITES_BEFORE] = 0
    vars(engine)[_WRITES_BEFORE] = num_writes(engine)
    with _engines_lock:
        _engines = [*(each for each in _engines if each() not in (None, engine)), weakref.ref(engine)]


def engines() -> list[Any]:
    """All engines of this process. Local."""
    return [engine for each in _engines if (engine := each()) is not None]


def num_writes(engine: AveragingModule) -> int:
    """Total number of in-place writes to the parameters of an engine's model since the engine was created. Local."""
    parameters = (each for each in engine.module.parameters() if not each.is_inference())
    return sum(map(version_of, parameters)) - int(vars(engine).get(_WRITES_BEFORE, 0))


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that an optimizer updates. Local."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
