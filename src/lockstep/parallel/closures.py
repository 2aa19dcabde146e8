"""`torch.optim.LBFGS` on several ranks: its closure gives all of them the loss of the global batch.

LBFGS decides by the loss how far to step and when to stop. The engine averages the gradients that the closure
computes, but the loss that it returns is each rank's own: left at that, ranks take different branches and end at
different parameters. So for optimizers whose parameters belong to an engine of more than one rank the closure is
wrapped: it returns the mean over ranks, each weighted by its share of the samples, the same bits on all of them.

Other optimizers do not judge the loss; their closures stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lockstep.drift import AveragingModule, engines_of
from lockstep.parallel.checks import host_device

__all__ = ["averaged_closure", "install", "weight_of"]

_is_installed = False


def weight_of(engine: AveragingModule) -> float:
    """This rank's share of the global batch relative to an even one, as the engine weights gradients. Local."""
    return 1.0


def install() -> None:
    """From now on average the losses by which LBFGS decides. Local; may be called again."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        register_optimizer_step_pre_hook(_average_losses)


def _average_losses(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of `optimizer.step`, with the closure wrapped; None to leave them alone."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return None
    engines = [engine for engine in engines_of(optimizer) if engine.process_group.size() > 1]
    if not engines:
        return None
    # The same one on all ranks.
    engine = min(engines, key=lambda each: (-each.process_group.size(), str(each.process_group.group_name)))
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": averaged_closure(kwargs["closure"], engine)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], averaged_closure(args[1], engine), *args[2:]), kwargs
    return None  # torch says itself what is missing.


def averaged_closure(
    closure: Callable[[], Any], engine: AveragingModule, weigh: Callable[[AveragingModule], float] = weight_of
) -> Callable[[], Any]:
    """A closure that returns the mean of all ranks' losses. Calls of it are collective.

    Args:
        closure: computes gradients and returns the loss: a tensor of one element, or a number.
        engine: over whose group to average.
        weigh: gives this rank's weight; the mean of all ranks' weights is 1.

    Returns:
        A function whose result has the loss's dtype, shape and device, and no graph.
    """

    def average() -> Any:
        loss = closure()
        return _mean_over_ranks(loss, engine, weigh(engine))

    return average


@torch.no_grad()
def _mean_over_ranks(loss: Any, engine: AveragingModule, weight: float) -> Any:
    """Collective."""
    group = engine.process_group
    local = torch.as_tensor(loss)
    total = local.detach().to(host_device(group, local.device), torch.float64, copy=True)
    # Not multiplied by zero: what a filler sample gives may be infinite.
    total = total * weight if weight else torch.zeros_like(total)
    dist.all_reduce(total, group=group)
    mean = total / group.size()
    return mean.to(local.device, local.dtype) if isinstance(loss, torch.Tensor) else mean.item()
