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

from lockstep import batch
from lockstep.drift import AveragingModule, engines_of
from lockstep.parallel.checks import host_device
from lockstep.parallel.losses import find_origin

__all__ = ["averaged_closure", "install"]

_is_installed = False


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


def averaged_closure(closure: Callable[[], Any], engine: AveragingModule) -> Callable[[], Any]:
    """A closure that returns the mean of all ranks' losses. Calls of it are collective.

    Args:
        closure: computes gradients and returns the loss: a tensor of one element, or a number.
        engine: over whose group to average.

    Returns:
        A function whose result has the loss's dtype, shape and device, and no graph.
    """

    def average() -> Any:
        loss = closure()
        return _mean_over_ranks(loss, engine, _weight_of(loss, engine))

    return average


def _weight_of(loss: Any, engine: AveragingModule) -> float:
    """This rank's weight in the forward pass that a loss comes from. Collective where that was not settled."""
    if isinstance(loss, torch.Tensor) and loss.grad_fn is not None:
        return find_origin("LBFGS", loss, engine.process_group, asks_the_loop=False).weight
    share = batch.active_share(in_backward=True)  # of the last forward pass
    return share.weight if share is not None and share.world_size == engine.process_group.size() else 1.0


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
