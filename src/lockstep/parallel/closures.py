"""`torch.optim.LBFGS` on several ranks: its closure gives all of them the loss of the global batch.

LBFGS decides by the loss how far to step and when to stop. The engine averages the gradients that the closure
computes, but the loss that it returns is each rank's own: left at that, ranks take different branches and end at
different parameters. So for optimizers whose parameters belong to an engine of more than one rank the closure is
wrapped: it returns the mean over ranks, each weighted by its share of the samples, the same bits on all of them.

Other optimizers do not use the loss; their closures stay as they are. Closures that call no engine stay as they are,
too: such a rank minimises a loss of its own.

[Note: several batches] A closure may walk through several batches, and return the sum of their losses. That is one
number by then, in which each rank's part of each batch has had no weight. It needs none where a rank's weight is the
same in all of them. Where it is not, on any rank, only a loss that all ranks have is one of the global batches; any
other is refused, on all ranks.

[Note: averaged once] A loss must be averaged exactly once, whatever else the process did. torch calls step hooks for a
class only after the process has created an instance of that class. A subclass whose `step` calls `LBFGS.step` would
therefore run the hooks once or twice, depending on whether the process has created a plain LBFGS before. So this module
creates one LBFGS in every process, and leaves a loss alone that is already a mean. It hooks both steps: a subclass may
never call `LBFGS.step`, or may pass it another closure than it was given.

[Note: lone steps] Scripts for torch's engine may step on one rank, while the others call the closure, whose collectives
are the same for all. Here the mean of the losses would be a collective of that rank alone. *Rejected:* to leave a loss
alone that a collective of the closure's own has written: it would take a record of what each collective writes, and
what the other ranks do between closures is still not what one that steps does.

Only engines that the closure has called count: others may wait for the garbage collector, which runs at another moment
on each rank ([Note: engines that are gone] in `drift/engines.py`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lockstep import batch
from lockstep.drift.engines import AveragingModule, engines_of, engines_used, latest_use
from lockstep.errors import CollectiveMismatch, InputError
from lockstep.parallel.forward_pass import ForwardPass
from lockstep.parallel.losses import find_origin
from lockstep.rank_zero import collective_device
from lockstep.torch_private.autograd import version_of

__all__ = ["averaged_closure", "explain_lone_steps", "install", "note_forward"]

_ADVICE = (
    "LBFGS gets the mean of all ranks' losses here: call optimizer.step(closure) on every rank, not on one while the "
    "others call the closure. The closure returns this rank's loss, without an all_reduce or a broadcast of its own; "
    "the gradients, and so the parameters, are the same on all ranks as it is"
)


class _Latest(threading.local):
    """The mean that this thread has returned last."""

    mean: Any = None
    version: int = -1  # of a tensor, which may be written to since
    group: dist.ProcessGroup | None = None


_latest = _Latest()


class _Watched(threading.local):
    """The forward passes with gradients of the closure that runs in this thread; None outside of closures."""

    forwards: list[ForwardPass] | None = None


_watched = _Watched()


def note_forward(forward: ForwardPass) -> None:
    """An engine begins a forward pass with gradients. Local."""
    if _watched.forwards is not None:
        _watched.forwards.append(forward)


@contextmanager
def _watch() -> Iterator[list[ForwardPass]]:
    """The forward passes that are made inside, and so inside of those around it. Local."""
    outer, own = _watched.forwards, list[ForwardPass]()
    _watched.forwards = own
    try:
        yield own
    finally:
        _watched.forwards = outer
        if outer is not None:
            outer += own


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
        engine of more than one rank, the result is that of `closure`. It raises InputError, on all ranks, if `closure`
        returns this rank's own sum over batches of which the ranks hold different shares; see [Note: several batches].
    """

    def average() -> Any:
        begin = latest_use()
        with _watch() as forwards:
            loss = closure()
        engines = [each for each in engines_used(optimizer, begin) if each.process_group.size() > 1]
        if not engines:
            return loss
        # The same one on all ranks.
        engine = min(engines, key=lambda each: (-each.process_group.size(), str(each.process_group.group_name)))
        if _is_mean(loss, engine.process_group):
            return loss
        with explain_lone_steps(optimizer):
            mean = _mean_over_ranks(loss, engine, _weight_of(loss, engine, forwards))
        _latest.mean, _latest.version, _latest.group = mean, _version_of(mean), engine.process_group
        return mean

    return average


@contextmanager
def explain_lone_steps(optimizer: Optimizer) -> Iterator[None]:
    """What steps of LBFGS ask all ranks inside of this is an error that says what to write. See [Note: lone steps]."""
    try:
        yield
    except CollectiveMismatch as error:
        if isinstance(optimizer, torch.optim.LBFGS):
            error.args = (f"{error.args[0]} {_ADVICE}", *error.args[1:])
        raise


def _is_mean(loss: Any, group: dist.ProcessGroup) -> bool:
    """Whether it is the very mean over this group that was returned last, and nobody has written to it."""
    return loss is _latest.mean and group is _latest.group and _version_of(loss) == _latest.version


def _version_of(loss: Any) -> int:
    return version_of(loss) if isinstance(loss, torch.Tensor) else 0


def _weight_of(loss: Any, engine: AveragingModule, forwards: Sequence[ForwardPass]) -> float | None:
    """This rank's weight in the forward passes that a loss comes from; None if it has several.

    Collective where that was not settled.
    """
    group = engine.process_group
    # What no gradient went through in the closure may be an evaluation, of which the weight need not be known.
    weights = {each.feed.weight for each in forwards if each.group is group and each.feed.question is None}
    if isinstance(loss, torch.Tensor) and loss.grad_fn is not None:
        for forward in batch.find_marks(loss):
            forward.settle()
            weights.add(forward.feed.weight)
        if len(weights) <= 1:
            return find_origin("LBFGS", loss, group, asks_the_loop=False).weight
    if weights:
        return weights.pop() if len(weights) == 1 else None
    share = batch.active_share(in_backward=True)  # of the last forward pass
    return share.weight if share is not None and share.world_size == group.size() else 1.0


@torch.no_grad()
def _mean_over_ranks(loss: Any, engine: AveragingModule, weight: float | None) -> Any:
    """Collective. Without a weight on any rank, the loss must be what all ranks have.

    Raises:
        InputError: on all ranks, if it is not.
    """
    group = engine.process_group
    local = loss if isinstance(loss, torch.Tensor) else torch.as_tensor(loss, dtype=torch.float64, device="cpu")
    value = local.detach().to(collective_device(group, local.device), torch.float64, copy=True)
    # Not multiplied by zero: what a filler sample gives may be infinite.
    weighted = value * weight if weight else torch.zeros_like(value)
    sums = torch.cat([weighted.reshape(-1), value.new_full((1,), weight is None)])
    dist.all_reduce(sums, group=group)
    mean = sums[:-1].view(value.shape) / group.size()
    if sums[-1]:
        mean = value
        _check_same(value, group)
    return mean.to(local.device, local.dtype) if isinstance(loss, torch.Tensor) else mean.item()


def _check_same(value: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Collective. See [Note: several batches]."""
    of_ranks = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(of_ranks, value, group=group)
    if not all(torch.allclose(each, of_ranks[0], rtol=0, atol=0, equal_nan=True) for each in of_ranks):
        raise InputError(
            "LBFGS: the closure calls the model on several batches, which the ranks do not divide alike, and returns "
            "each rank's own sum of their losses: how much a rank counts in it differs from batch to batch. Behind the "
            "forward pass of each batch write loss = lockstep.mean(loss * len(y), len(y)), with the number of samples "
            "that the loss is the mean over, and go on with that; or give the loader drop_last=True and a batch size "
            "that the ranks divide"
        )
