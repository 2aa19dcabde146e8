"""The engines of this process.

[Note: engines that are gone] An engine that is part of a reference cycle lives until the garbage collector comes, which
is another moment on each rank. So nobody may make a collective because of an engine that is merely still there: only
its own passes do. What ranks say of it when the world is left is said in `comparison.py`.
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

    def check_unread(self) -> None:
        """Raise if the ranks have averaged what does not belong together, and it was not read yet. Local."""

    @property
    def has_averaged(self) -> bool:
        """Whether it has averaged anything since it was made. Local."""

    def tensors_alike(self) -> Mapping[str, torch.Tensor]:
        """What must be the same on all ranks when training is over, by name. Local."""


_WRITES_BEFORE = "_writes_before"  # to the parameters, before the engine was made: an attribute of it
# A new list with each engine, in which the dead ones stay until the next: every step reads it, sooner than a WeakSet.
_engines: list[weakref.ref[Any]] = []
_engines_lock = threading.Lock()  # ranks may be threads


def note_engine(engine: AveragingModule) -> None:
    """This engine averages the gradients of its module's parameters. Local."""
    global _engines
    vars(engine)[_WRITES_BEFORE] = 0
    vars(engine)[_WRITES_BEFORE] = num_writes(engine)
    with _engines_lock:
        _engines = [*(each for each in _engines if each() not in (None, engine)), weakref.ref(engine)]


def engines() -> list[Any]:
    """All engines of this process. Local."""
    return [engine for each in _engines if (engine := each()) is not None]


def num_writes(engine: AveragingModule) -> int:
    """How often parameters of its model were written to in place since the engine was made, summed. Local."""
    parameters = (each for each in engine.module.parameters() if not each.is_inference())
    return sum(map(version_of, parameters)) - int(vars(engine).get(_WRITES_BEFORE, 0))


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that it steps. Local."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
