"""Losses that are not a mean over samples, with the divisor of a single process at any number of ranks.

An engine weights gradients by the number of samples of each rank, which is right for a loss that is a mean over
samples. For any other loss there is a function here. On every rank it returns the value that one process would have
computed, and after averaging, the gradients are those of one process:

    loss = lockstep.mean(loss_sum, count)     a mean over something else: tokens, pixels, boxes, weighted classes
    loss = lockstep.sum(loss_sum)             a sum
    features = lockstep.all_gather(features)  inputs of a loss over the samples of all ranks
    loss = lockstep.global_loss(loss)         a loss written for torch's engine, divided by a global count by hand

Terms may be added: each has its own divisor, and a term without any of these functions stays a mean over samples::

    words = lockstep.mean(cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), (labels != -100).sum())
    loss = words + cross_entropy(order, is_next)

With accumulation every micro-batch is divided by its own count. To divide all of a window by the window's count, add
that up first, without fillers (`lockstep.is_filler`)::

    words = lockstep.sum(torch.tensor(float(count_of_the_window)))
    loss = lockstep.sum(loss_sum) / words

[Note: divisors] An engine multiplies gradients by a rank's weight w = n_r·W/n and takes the mean over its W ranks. A
loss that is the sum of l_r over ranks, divided by d, has the gradient sum(l_r')/d; so l_r' is multiplied by W/(d·w)
here. The engine's forward passes that a loss comes from, and so w and W, are found in its graph
(`lockstep/batch/graph.py`). If there are none, as with torch's engine or inside a `forward()`, w is 1 and W the size of
the default group.

[Note: what becomes of the value] Every rank gets the value and may compute with it: subtract a mean from each sample,
or return a loss from a model, whose engine weights it. The gradient that comes back to the value is then this rank's
g_r, and the gradient of one process is the mean over ranks of w·g_r, by which l_r' is multiplied. An all_reduce of two
numbers in the backward pass computes it. So if one rank's total has a graph, the value has one on every rank.

[Note: gradients of what was gathered] Rank r holds n_r of n samples, and computes a loss from the gathered features:
the same on every rank, or the mean over its own samples against those of all. Either way the loss of one process is the
sum of n_r/n times the losses of the ranks. So the gradient of the gathered features is the sum over ranks of their
gradients, each times the rank's weight w_r = n_r·W/n, divided by W. Since an engine multiplies gradients at its outputs
by its weight and takes the mean over W ranks, each rank returns this sum, divided by its own weight, for its features.
"""

from __future__ import annotations

import builtins
import numbers
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import batch
from lockstep.agreement import collective_device, gather, has_group
from lockstep.errors import InputError, InputTypeError
from lockstep.parallel.forward_pass import ForwardPass

__all__ = ["Origin", "all_gather", "find_origin", "global_loss", "mean", "sum"]


def mean(total: Tensor, count: Tensor | float, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """The mean over the items of all ranks: the sum of `total` over ranks, divided by the sum of `count`.

    For a loss that is divided by something other than the number of samples: valid tokens (`ignore_index`, padding),
    class weights, pixels under a mask, boxes, positives. The total of a rank with a count of 0 still counts, such as
    that of a focal loss with negatives only. Only a total of nan with a count of 0 counts as 0, as results from a model
    that returns the mean over its items: `lockstep.mean(out.loss * n, n)`.

    Collective: one all_reduce of three numbers, and one of two in the backward pass; every rank calls it, and runs its
    backward pass, at the same places.

    Args:
        total: 0-dim; the sum over this rank's items, with a graph while training.
        count: the number of these items (or the sum of their weights), as a number or 0-dim tensor. For a filler
            neither counts.
        process_group: the ranks to add up; by default the group of the engine that `total` comes from, else the default
            group.

    Returns:
        0-dim, of `total`'s dtype and device: the same value on every rank. If the count of all ranks is 0, it is nan or
        infinite as in one process, with a gradient of 0. To divide by at least 1 write
        `lockstep.sum(total) / lockstep.sum(count.float()).clamp(min=1)`, with a count of 0 for a filler
        (`lockstep.is_filler`): counts clamped on each rank would add up to too much.

    Raises:
        InputTypeError: `total` is not a floating 0-dim tensor.
        InputError: `total` comes from forward passes in which this rank holds different shares; or `count` is no
            number, negative, or requires a gradient, which is not computed.

        >>> logits, labels = torch.zeros(3, 2), torch.tensor([0, 1, -100])
        >>> loss_sum = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        >>> mean(loss_sum, (labels != -100).sum())
        tensor(0.6931)
    """
    _check_scalar("mean", total)
    origin = find_origin("mean", total, process_group)
    if isinstance(count, Tensor):
        if count.requires_grad:
            raise InputError(
                "mean: count requires a gradient, which is not computed here. Write count.detach() if it is a "
                "constant; else divide by lockstep.sum(count) yourself: lockstep.sum(total) / lockstep.sum(count)"
            )
        own = count
    else:
        own = _as_count(count, total.device)
    if own.dim() != 0:
        raise InputTypeError(f"mean: count is a tensor of shape {list(own.shape)}; pass one number: count.sum()")
    sums = origin.add_up(total, own)
    is_void = origin.is_filler or _is_nothing(total, own) | (sums[1] == 0).to(total.device)
    return _Rescale.of(_with_graph(total, sums[2]), sums[0] / sums[1], origin, origin.factor / sums[1], is_void)


def sum(total: Tensor, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of `total` over all ranks, for a loss with `reduction="sum"`, or for a count.

    Collective, as `mean`.

    Args:
        total: 0-dim, floating; the sum over this rank's samples, with a graph while training. A filler's total does not
            count; one without a graph counts unchanged.
        process_group: as in `mean`.

    Returns:
        0-dim, of `total`'s dtype and device: the same value on every rank.

    Raises:
        InputTypeError, InputError: as in `mean`.

        >>> sum(torch.tensor(2.5))
        tensor(2.5000)
    """
    _check_scalar("sum", total)
    origin = find_origin("sum", total, process_group, asks_the_loop=False)
    sums = origin.add_up(total, torch.ones((), device=total.device))
    return _Rescale.of(_with_graph(total, sums[2]), sums[0], origin, origin.factor, origin.is_filler)


def global_loss(loss: Tensor, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """A loss whose plain mean over ranks is already right: it is not weighted by this rank's share of the samples.

    For losses that the script divides by a global count and multiplies by the number of ranks, as many programs do for
    torch's engine. Not for losses over features gathered with gradients, for which there is `lockstep.all_gather`.
    Every rank calls it, at the same places.

    Args:
        loss: 0-dim, with a graph.
        process_group: as in `mean`.

    Returns:
        The same value.

    Raises:
        InputTypeError, InputError: as in `mean`; also for a loss over gathered features.
    """
    _check_scalar("global_loss", loss)
    origin = find_origin("global_loss", loss, process_group)
    if "_GatherRowsBackward" in batch.graph.names_behind(loss):  # torch's name of our node
        raise InputError(
            "global_loss: this loss was computed from the result of lockstep.all_gather, which already gives the "
            "gradients of one process. Leave global_loss out"
        )
    if origin.is_filler:
        raise InputError(
            "global_loss: this rank has a filler, which repeats a sample of another rank, and it was counted. Leave "
            "fillers out of the count (lockstep.is_filler)"
        )
    return _Rescale.of(loss, loss.detach(), None, origin.factor / origin.world_size, False)


@dataclass(frozen=True)
class Origin:
    """The forward passes that a loss comes from.

    Attributes:
        group: their engine's group; None for one process.
        weight: the weight that the engine gives their gradients on this rank.
        is_filler: whether this rank's samples do not count.
    """

    group: dist.ProcessGroup | None
    weight: float
    is_filler: bool

    @property
    def world_size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def factor(self) -> float:
        """Factor that turns this rank's gradient into its part of a global sum; see [Note: divisors]."""
        return 0.0 if self.is_filler or not self.weight else self.world_size / self.weight

    def add_up(self, total: Tensor, count: Tensor) -> Tensor:
        """The sums of both over ranks, and the number of totals with a graph, float64 [3]. Collective."""
        device = self.device(total)
        has_graph = torch.is_grad_enabled() and total.requires_grad
        own = torch.stack([total.detach().to(device, torch.float64), count.to(device, torch.float64)])
        own = own.zero_() if self.is_filler else own.masked_fill(_is_nothing(own[0], own[1]), 0)
        own = torch.cat([own, torch.full((1,), float(has_graph), dtype=torch.float64, device=device)])
        if self.world_size > 1:
            dist.all_reduce(own, group=self.group)
        return own

    def mean_over_ranks(self, gradient: Tensor) -> Tensor:
        """The weighted mean of the gradients on all ranks. Collective. See [Note: what becomes of the value]."""
        if self.world_size == 1:
            return gradient
        own = gradient.detach().to(self.device(gradient), torch.float64)
        # Not multiplied by zero: what a filler sample gives may be infinite.
        own = torch.stack([own, torch.ones_like(own)]) * self.weight if self.weight else own.new_zeros(2)
        dist.all_reduce(own, group=self.group)
        return (own[0] / own[1]).to(gradient.device, gradient.dtype)

    def device(self, tensor: Tensor) -> torch.device:
        """The device for collectives of the group: the tensor's, or nccl's. Local."""
        return tensor.device if self.group is None else collective_device(self.group, tensor.device)


def _is_nothing(total: Tensor, count: Tensor) -> Tensor:
    """Whether a total is 0 times the mean of nothing: a bool [], computed without waiting for a GPU. Local."""
    return (count == 0) & total.detach().isnan()


def _check_scalar(name: str, loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        shape = f"of shape {list(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputTypeError(
            f"{name}: expected a floating tensor without dimensions, got {shape}. Reduce it with .sum(), convert a "
            "count with .float(), or pass each number separately. A per-feature mean is lockstep.all_gather(x).mean(0)"
        )


def _as_count(count: object, device: torch.device) -> Tensor:
    """A number of items as a tensor, float64 []."""
    if not isinstance(count, numbers.Real) or count < 0:
        raise InputError(f"mean: count is {count!r}; expected how many items `total` adds up, a number or 0-dim tensor")
    # Written where it is needed: a copy from the host would wait for a GPU.
    return torch.full((), float(count), dtype=torch.float64, device=device)


def find_origin(name: str, loss: Tensor, process_group: dist.ProcessGroup | None, asks_the_loop: bool = True) -> Origin:
    """The forward passes that a tensor comes from. Collective if one of them does not know its weight yet.

    Args:
        name: name of the calling function, for errors.
        loss: a tensor with or without a graph.
        process_group: replaces the engine's.
        asks_the_loop: whether, without a graph, the loop decides if the batch is a filler.
    """
    forwards = cast("list[ForwardPass]", batch.graph.find_marks(loss))
    if not forwards:
        group = process_group or (dist.group.WORLD if has_group(f"lockstep.{name}") else None)
        is_filler = asks_the_loop and _is_filler(name, loss)
        share = None if loss.requires_grad else batch.hand.latest_forward()  # other ranks' totals may come from it
        if share is None or group is None or share.world_size != group.size():
            return Origin(group, 1.0, is_filler)
        return Origin(group, share.weight, is_filler)
    if len({forward.settle() for forward in forwards}) > 1:
        raise InputError(
            f"{name}: this loss comes from forward passes on two batches, of which this rank has different shares. "
            f"Call {name} once per batch, and add up the results"
        )
    first = forwards[0]
    return Origin(process_group or first.group, first.feed.weight, first.is_filler)


def _is_filler(name: str, loss: Tensor) -> bool:
    """Whether a tensor that comes from none of our forward passes belongs to a filler. Local."""
    tag = batch.tags.find_tag(loss)
    share = tag.share if tag is not None else batch.hand.active_share(in_backward=False)
    if share is not None:
        return share.local_samples == 0
    found = batch.hand.of_a_value()
    fillers = [share for share in found if share.local_samples == 0]
    if fillers and len(fillers) < len(found):
        raise InputError(
            f"{name}: cannot tell whether this comes from a filler, which must not count, because the loop prefetches "
            "batches or uses several loaders. Pass a tensor with a graph from lockstep.DistributedDataParallel"
        )
    return bool(fillers)


def _with_graph(total: Tensor, num_graphs: Tensor) -> Tensor:
    """A total that takes part in the backward pass if any rank's total does."""
    if total.requires_grad or not torch.is_grad_enabled() or not num_graphs.item():
        return total
    return total.detach().requires_grad_()


class _MeanOverRanks(torch.autograd.Function):
    """The mean of a gradient over ranks; differentiable in the same way, for `create_graph=True`."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, origin: Origin) -> Tensor:
        ctx.origin = origin
        return origin.mean_over_ranks(gradient)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _MeanOverRanks.apply(gradient, ctx.origin), None  # type: ignore[no-untyped-call]


class _Rescale(torch.autograd.Function):
    """Replaces the value, and multiplies the gradient by a factor; if ranks share the value, theirs are averaged."""

    @staticmethod
    def of(
        loss: Tensor, value: Tensor, origin: Origin | None, factor: float | Tensor, is_void: bool | Tensor
    ) -> Tensor:
        """Apply the function; `is_void` means that the gradient is 0, for any value of the loss."""
        value = value.to(loss.device, loss.dtype)
        return cast(Tensor, _Rescale.apply(loss, value, origin, factor, is_void))  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, value: Tensor, origin: Origin | None, factor: float | Tensor, is_void: bool | Tensor
    ) -> Tensor:
        ctx.origin, ctx.factor, ctx.is_void = origin, factor, is_void
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.origin is not None:
            gradient = _MeanOverRanks.apply(gradient, ctx.origin)  # type: ignore[no-untyped-call]
        factor = ctx.factor.to(gradient.device) if isinstance(ctx.factor, Tensor) else ctx.factor
        scaled = gradient * factor
        if isinstance(ctx.is_void, Tensor):  # if only the device knows
            scaled = torch.where(ctx.is_void.to(gradient.device), 0.0, scaled)
        elif ctx.is_void:
            scaled = torch.zeros_like(gradient)
        return scaled.to(gradient.dtype), None, None, None, None


def all_gather(features: Tensor, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """The rows of all ranks in rank order, with the gradients of one process.

    For losses across samples, such as contrastive ones. The rest of the loss may be written as for one process, over
    all rows, or as a mean over this rank's rows against all: both give one process's gradients, also if ranks hold
    different numbers of samples. A filler's rows are left out.

    Labels, indices and masks are gathered unchanged. To find this rank's rows, gather a column of ranks::

        owners = lockstep.all_gather(torch.full((len(x),), rank))
        own = (owners < rank).sum() + torch.arange(len(x))
        own = own.clamp(max=len(owners) - 1)                    # a filler has none, and does not count

    Collective: every rank calls it, and its backward pass, at the same places.

    Args:
        features: [rows, …], floating, integer or bool; only the number of rows may differ between ranks.
        process_group: the ranks to gather from; by default the group of the engine that `features` come from, else the
            default group.

    Returns:
        [rows of all ranks, …]; the same values on every rank.

    Raises:
        InputTypeError: not a tensor with rows, or complex numbers.
        InputError: `features` come from forward passes in which this rank holds different shares.

        >>> all_gather(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """
    if not isinstance(features, Tensor) or features.dim() < 1 or features.is_complex():
        kind = f"{features.dtype}{list(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise InputTypeError(f"all_gather: expected a tensor of real numbers with rows, got {kind}")
    origin = find_origin("all_gather", features, process_group)
    return cast(Tensor, _GatherRows.apply(features, origin))  # type: ignore[no-untyped-call]


class _GatherRows(torch.autograd.Function):
    """See [Note: gradients of what was gathered]."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, origin: Origin) -> Tensor:
        ctx.origin, ctx.shape = origin, features.shape
        own = features.detach()[:0] if origin.is_filler else features.detach()
        group = origin.group
        if group is None or group.size() == 1:
            ctx.begin, ctx.end = 0, len(own)
            return own.clone()
        own = own.to(origin.device(features))
        rows = gather(torch.full((), len(own), device=own.device), group).tolist()
        ctx.begin = builtins.sum(rows[: group.rank()])
        ctx.end = ctx.begin + len(own)
        padded = own.new_zeros(max(rows), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(parts, padded, group=group)
        gathered = torch.cat([part[:size] for part, size in zip(parts, rows, strict=True)]).to(features.device)
        if not len(gathered):
            raise InputError("all_gather: no rank has any rows")
        if not features.is_floating_point():
            ctx.mark_non_differentiable(gathered)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        origin: Origin = ctx.origin
        own = torch.zeros_like(gradient) if origin.is_filler else (gradient * origin.weight).contiguous()
        if origin.world_size > 1:
            own = own.to(origin.device(gradient))
            dist.all_reduce(own, group=origin.group)
        if origin.is_filler:
            return gradient.new_zeros(ctx.shape), None
        return (own[ctx.begin : ctx.end] / origin.weight).to(gradient), None
