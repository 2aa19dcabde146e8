"""`torch.optim.LBFGS` on several ranks: its closure returns the loss of the global batch on all of them.

LBFGS decides by the loss how far to step and when to stop. The engine averages the gradients that the closure
computes, but the loss that it returns is each rank's own: left at that, ranks take different branches. So where an
engine of several ranks has what LBFGS steps, and the closure calls it, what that returns is one of two things:

- a tensor with the graph of this rank's loss. The wrapped closure returns the mean over ranks, each weighted by its
  share of the samples, as the engine weights the gradients: the same bits on all ranks.
- anything else: a number, or a tensor that was detached. Nothing tells which samples it is of, so it must be what all
  ranks have, as `lockstep.mean` returns it. If it is not, that is an error on all ranks.

Other optimizers do not use the loss, and their closures stay as they are. So does a closure that calls no engine: such
a rank minimises a loss of its own. An engine that is merely there does not count, as it may be gone on another rank
([Note: engines that are gone] in `drift/engines.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lockstep import batch
from lockstep.agreement import collective_device, gather
from lockstep.drift.engines import StepArguments
from lockstep.errors import CollectiveMismatch, InputError
from lockstep.parallel.backward_pass import BackwardPass
from lockstep.parallel.losses import find_origin

__all__ = ["with_mean_of_closure"]

_UNKNOWN = -1.0  # a weight


@dataclass(eq=False)
class _MeanOfClosure:
    """A closure that returns the mean of all ranks' losses. Calls of it are collective if it calls an engine.

    Attributes:
        closure: the user's.
        engines: those that average what is stepped: the group of each, by its backward pass.
    """

    closure: Callable[[], Any]
    engines: dict[BackwardPass, dist.ProcessGroup] = field(default_factory=dict)

    def __call__(self) -> Any:
        before = {backward: backward.num_begun for backward in self.engines}
        loss = self.closure()
        groups = [group for backward, group in self.engines.items() if backward.num_begun != before[backward]]
        if not groups:
            return loss
        try:
            # Of several groups the same one on all ranks.
            mean = _mean_over_ranks(loss, min(groups, key=lambda each: (-each.size(), str(each.group_name))))
        except CollectiveMismatch as error:
            advice = "LBFGS: call optimizer.step(closure) on every rank, not on one while the others call the closure"
            error.args = (f"{error.args[0]} {advice}", *error.args[1:])
            raise
        return mean.to(loss.device, loss.dtype) if isinstance(loss, torch.Tensor) else mean.item()


def with_mean_of_closure(arguments: StepArguments, backward: BackwardPass, group: dist.ProcessGroup) -> StepArguments:
    """The arguments of a step of LBFGS, with its closure wrapped. Local; called by each engine of what is stepped.

    Args:
        arguments: positional ones, the optimizer first, and keyword ones.
        backward: the engine's; tells whether the closure calls the engine.
        group: the engine's.
    """
    args, kwargs = arguments
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return arguments  # torch says itself what is missing
    # Wrapped already for another engine, or by the step of a subclass, which calls that of LBFGS.
    wrapped = closure if isinstance(closure, _MeanOfClosure) else _MeanOfClosure(closure)
    wrapped.engines[backward] = group
    return (args, {**kwargs, "closure": wrapped}) if "closure" in kwargs else ((args[0], wrapped, *args[2:]), kwargs)


@torch.no_grad()
def _mean_over_ranks(loss: Any, group: dist.ProcessGroup) -> torch.Tensor:
    """Collective.

    Raises:
        InputError: on all ranks, if the loss of one has no graph, and the ranks have different ones.
    """
    local = loss if isinstance(loss, torch.Tensor) else torch.as_tensor(loss, dtype=torch.float64, device="cpu")
    value = local.detach().to(collective_device(group, local.device), torch.float64)
    own = torch.cat([value.reshape(-1), value.new_full((1,), _weight_of(local, group))])
    rows = gather(own, group)
    values, weights = rows[:, :-1], rows[:, -1].tolist()
    if _UNKNOWN not in weights:
        # Not multiplied by zero: what a filler sample gives may be infinite.
        parts = [each * weight for each, weight in zip(values, weights, strict=True) if weight]
        return torch.stack(parts).sum(0).view(value.shape) / group.size()
    if not all(torch.allclose(each, values[0], rtol=0, atol=0, equal_nan=True) for each in values):
        raise InputError(
            "LBFGS: the closure's loss differs between ranks, and has no graph or covers several batches of which "
            "ranks have different shares, so its weight per rank is unknown. Return the loss on which it called "
            "backward(); to add up several, write total += lockstep.mean(loss * len(y), len(y)).item() for each, "
            "with the number of samples that the loss is the mean over"
        )
    return value


def _weight_of(loss: torch.Tensor, group: dist.ProcessGroup) -> float:
    """This rank's weight in the forward passes that a loss comes from. Collective where that was not settled."""
    if loss.grad_fn is None or not batch.graph.find_marks(loss):
        return _UNKNOWN
    with suppress(InputError):  # of several batches with different weights
        return find_origin("LBFGS", loss, group, asks_the_loop=False).weight
    return _UNKNOWN
