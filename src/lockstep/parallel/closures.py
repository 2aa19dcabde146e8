"""`torch.optim.LBFGS` on several ranks: its closure gives all of them the loss of the global batch.

LBFGS decides by the loss how far to step and when to stop. The engine averages the gradients that the closure
computes, but the loss that it returns is each rank's own: left at that, ranks take different branches and end at
different parameters. So for optimizers whose parameters belong to an engine of more than one rank the closure is
wrapped: it returns the mean over ranks, each weighted by its share of the samples, the same bits on all of them.

Other optimizers do not use the loss; their closures stay as they are. Closures that call no engine stay as they are,
too: such a rank minimises a loss of its own.

[Note: averaged once] A loss must be averaged exactly once, whatever else the process did. torch calls step hooks for a
class only after the process has created an instance of that class. A subclass whose `step` calls `LBFGS.step` would
therefore run the hooks once or twice, depending on whether the process has created a plain LBFGS before. So this module
creates one LBFGS in every process, and leaves a loss alone that is already a mean. It hooks both steps: a subclass may
never call `LBFGS.step`, or may pass it another closure than it was given.

Only engines that the closure has called count: others may wait for the garbage collector, which runs at another moment
on each rank ([Note: engines that are gone] in `drift/engines.py`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lockstep import batch
from lockstep.drift.engines import AveragingModule, engines_of, engines_used, latest_use
from lockstep.parallel.losses import find_origin
from lockstep.rank_zero import collective_device
from lockstep.torch_private.autograd import version_of

__all__ = ["averaged_closure", "install"]


class _Latest(threading.local):
    """The mean that this thread has returned last."""

    mean: Any = None
    version: int = -1  # of a tensor, which may be written to since
    group: dist.ProcessGroup | None = None


_latest = _Latest()


@functools.cache
def install() -> None:
    """From now on average the losses by which LBFGS decides. Local; may be called again."""
    register_optimizer_step_pre_hook(_average_losses)
    torch.optim.LBFGS([torch.nn.Parameter(torch.zeros((), device="cpu"))])  # see [Note: averaged once]


def _average_losses(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of `optimizer.step`, with the closure wrapped; None to leave them alone."""
    if not isinstance(optimizer, torch.optim.LBFGS) or not engines_of(optimizer):
        return None
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": averaged_closure(kwargs["closure"], optimizer)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], averaged_closure(args[1], optimizer), *args[2:]), kwargs
    return None  # torch says itself what is missing.


def averaged_closure(closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
    """A closure that returns the mean of all ranks' losses. Calls of it are collective if it calls an engine.

    Args:
        closure: computes gradients and returns the loss: a tensor of one element, or a number.
        optimizer: whose parameters belong to the engines over whose groups to average.

    Returns:
        A function whose result has the loss's dtype, shape and device, and no graph. Where `closure` has called no
        engine of more than one rank, the result is that of `closure`.
    """

    def average() -> Any:
        begin = latest_use()
        loss = closure()
        engines = [each for each in engines_used(optimizer, begin) if each.process_group.size() > 1]
        if not engines:
            return loss
        # The same one on all ranks.
        engine = min(engines, key=lambda each: (-each.process_group.size(), str(each.process_group.group_name)))
        if _is_mean(loss, engine.process_group):
            return loss
        mean = _mean_over_ranks(loss, engine, _weight_of(loss, engine))
        _latest.mean, _latest.version, _latest.group = mean, _version_of(mean), engine.process_group
        return mean

    return average


def _is_mean(loss: Any, group: dist.ProcessGroup) -> bool:
    """Whether it is the very mean over this group that was returned last, and nobody has written to it."""
    return loss is _latest.mean and group is _latest.group and _version_of(loss) == _latest.version


def _version_of(loss: Any) -> int:
    return version_of(loss) if isinstance(loss, torch.Tensor) else 0


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
    local = loss if isinstance(loss, torch.Tensor) else torch.as_tensor(loss, device="cpu")
    total = local.detach().to(collective_device(group, local.device), torch.float64, copy=True)
    # Not multiplied by zero: what a filler sample gives may be infinite.
    total = total * weight if weight else torch.zeros_like(total)
    dist.all_reduce(total, group=group)
    mean = total / group.size()
    return mean.to(local.device, local.dtype) if isinstance(loss, torch.Tensor) else mean.item()
