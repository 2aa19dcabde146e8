"""The engines of this process.

[Note: engines that are gone] An engine that is part of a reference cycle lives until the garbage collector comes, which
is another moment on each rank. So nobody may make a collective because of an engine that is merely still there: only
its own passes do, and what ranks say of it when the world is left counts for those that have it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

__all__ = ["AveragingModule", "engines", "is_engine", "note_engine", "parameters_of"]

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


class AveragingModule(Protocol):
    """What is known of an engine: it averages the gradients of its module's parameters over a group.

    Attributes:
        module: the model.
        process_group: the ranks that average.
        number: of the engines over this group, which all of its ranks have made in the same order; negative for a
            copy, which a rank may make alone.
    """

    module: torch.nn.Module
    process_group: dist.ProcessGroup
    number: int

    def pre_step(self, optimizer: Optimizer, arguments: StepArguments) -> StepArguments | None:
        """An optimizer is about to step. Local.

        Returns:
            None if the engine averages nothing that it steps; else what `step` shall be called with.
        """

    def tensors_alike(self) -> Mapping[str, torch.Tensor]:
        """What must be the same on all ranks when training is over, by name. Local."""


# A new list with each engine, in which the dead ones stay until the next: every step reads it, sooner than a WeakSet.
_engines: list[weakref.ref[Any]] = []
_engines_lock = threading.Lock()  # ranks may be threads


def note_engine(engine: AveragingModule) -> None:
    """This engine averages the gradients of its module's parameters. Local."""
    global _engines
    with _engines_lock:
        _engines = [*(each for each in _engines if each() not in (None, engine)), weakref.ref(engine)]


def is_engine(module: torch.nn.Module) -> bool:
    """Whether it is an engine. Local."""
    return any(each() is module for each in _engines)


def engines() -> list[Any]:
    """All engines of this process. Local."""
    return [engine for each in _engines if (engine := each()) is not None]


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that it steps. Local."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
