"""The engines of this process, and which optimizers step what they average.

[Note: engines that are gone] An engine that is part of a reference cycle lives until the garbage collector comes, which
is another moment on each rank. What ranks decide by the engines of an optimizer they must decide alike. So who is about
to communicate because of an engine, or to raise, collects garbage before; or goes by engines that were used just now.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

__all__ = [
    "AveragingModule",
    "engines",
    "engines_of",
    "engines_used",
    "is_engine",
    "latest_use",
    "note_engine",
    "note_use",
    "parameters_of",
]


class AveragingModule(Protocol):
    """What is known of an engine: it averages the gradients of its module's parameters over a group.

    Attributes:
        last_used: the number of its last use (`note_use`); of two engines the one used later has the greater.
        unaveraged: the parameters that it trains, if it has averaged nothing so far, and was not told to; else none.
        has_trained: there was a forward pass in training mode, with gradients.
    """

    module: torch.nn.Module
    process_group: dist.ProcessGroup
    last_used: int

    @property
    def unaveraged(self) -> list[torch.Tensor]:
        """See the class."""

    @property
    def has_trained(self) -> bool:
        """See the class."""


# A new list with each engine, in which the dead ones stay until the next: every step reads it, sooner than a WeakSet.
_engines: list[weakref.ref[Any]] = []
_engines_lock = threading.Lock()  # ranks may be threads
_num_uses = 0


def note_engine(engine: AveragingModule) -> None:
    """This engine averages the gradients of its module's parameters. Local."""
    global _engines
    note_use(engine)
    with _engines_lock:
        _engines = [*(each for each in _engines if each() not in (None, engine)), weakref.ref(engine)]


def note_use(engine: AveragingModule) -> None:
    """This engine begins a forward pass. Local."""
    global _num_uses
    _num_uses += 1
    object.__setattr__(engine, "last_used", _num_uses)  # past that of modules, which looks for parameters


def latest_use() -> int:
    """The number of the last use of an engine. Local."""
    return _num_uses


def is_engine(module: torch.nn.Module) -> bool:
    """Whether it is an engine. Local."""
    return any(each() is module for each in _engines)


def engines() -> list[Any]:
    """All engines of this process. Local."""
    return [engine for each in _engines if (engine := each()) is not None]


def engines_of(optimizer: Optimizer) -> list[Any]:
    """The engines that average any of its parameters. Local. See [Note: engines that are gone]."""
    own = set(map(id, parameters_of(optimizer)))
    return [engine for engine in engines() if not own.isdisjoint(map(id, engine.module.parameters()))]


def engines_used(optimizer: Optimizer, after: int) -> list[Any]:
    """The engines that average any of its parameters and were used after that number of `latest_use`. Local."""
    return [engine for engine in engines_of(optimizer) if engine.last_used > after]


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that it steps. Local."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
