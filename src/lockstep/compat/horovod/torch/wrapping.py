"""Adds a class to an optimizer, and finds names of its parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from lockstep.errors import InputError

__all__ = ["find_names", "wrap"]


def wrap(optimizer: torch.optim.Optimizer, addition: type) -> Any:
    """An optimizer that shares all attributes with this one, of a subclass with `addition` before its class. Local.

    Raises:
        InputError: Apex's amp has changed this one's steps, which the new one would not include.
    """
    stash = getattr(optimizer, "_amp_stash", None)  # Apex's mark of optimizers passed to amp.initialize
    if stash is not None and stash.changes_steps():
        raise InputError(
            "hvd.DistributedOptimizer was called with an optimizer from amp.initialize: its steps would "
            "not include amp's part (master weights, skipping after an overflow). Wrap the optimizer first, and "
            "call amp.initialize(model, optimizer) with the result; call optimizer.synchronize() inside "
            "amp.scale_loss"
        )
    kind = type(optimizer)
    derived: Any = type(
        kind.__name__, (addition, kind), {"__doc__": addition.__doc__, "__module__": addition.__module__}
    )
    wrapped = derived.__new__(derived)
    # Learning rate schedulers created before set a `step` on the instance, which is bound to the old one.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    return wrapped


def find_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> tuple[list[str], list[torch.Tensor]]:
    """Names and parameters of an optimizer, in the order of its groups.

    Raises:
        InputError: items are not pairs, names are repeated, or parameters have no name.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        names = [
            f"allreduce.noname.{number}.{index}"
            for number, group in enumerate(optimizer.param_groups)
            for index in range(len(group["params"]))
        ]
        return names, parameters
    pairs: list[Any] = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise InputError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise InputError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    name_of = {id(parameter): str(name) for name, parameter in pairs}
    unnamed = [tuple(parameter.shape) for parameter in parameters if id(parameter) not in name_of]
    if unnamed:
        raise InputError(
            "named_parameters was specified, but one or more model parameters were not named. Their shapes: "
            f"{', '.join(map(str, unnamed))}"
        )
    return [name_of[id(parameter)] for parameter in parameters], parameters
