"""The features of all ranks, for losses that compare every sample with every other.

[Note: gradients of what was gathered] Rank r holds n_r of n samples, and computes a loss from the gathered features:
the same on every rank, or the mean over its own samples against those of all. Either way the loss of one process is
the sum of n_r/n times the losses of the ranks. So the gradient of the gathered features is the sum over ranks of
theirs, each times the rank's weight w_r = n_r·W/n, divided by W; and since an engine multiplies what comes to its
outputs by its own weight and takes the mean over W ranks, a rank hands the sum, divided by its own weight, to its own
features.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import InputError, InputTypeError
from lockstep.parallel.losses import Origin, find_origin

__all__ = ["all_gather"]


def all_gather(features: Tensor, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """The rows of all ranks in rank order, with gradients: those of one process.

    For contrastive losses and the like. The rest of the loss may be written as for one process, over all rows, or as a
    mean over this rank's rows against all: both give one process's gradients, also when ranks hold different numbers
    of samples. A filler's rows are left out.

    Labels, indices and masks are gathered as they are. Which rows are this rank's says a gathered column of ranks::

        owners = lockstep.all_gather(torch.full((len(x),), rank))
        own = (owners < rank).sum() + torch.arange(len(x))
        own = own.clamp(max=len(owners) - 1)                    # a filler has none, and does not count

    Collective: every rank calls it, and its backward pass, at the same places.

    Args:
        features: [rows, …], floating, integer or bool; the number of rows may differ between ranks, the rest not.
        process_group: whose rows; default the group of the engine that `features` come from, else the default group.

    Returns:
        [rows of all ranks, …]; the same values on every rank.

    Raises:
        InputTypeError: no tensor with rows, or complex numbers.
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
        sizes = torch.zeros(group.size(), dtype=torch.int64, device=own.device)
        sizes[group.rank()] = len(own)
        dist.all_reduce(sizes, group=group)
        rows = sizes.tolist()
        ctx.begin = int(sum(rows[: group.rank()]))
        ctx.end = ctx.begin + len(own)
        padded = own.new_zeros(max(rows), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(parts, padded, group=group)
        gathered = torch.cat([part[:size] for part, size in zip(parts, rows, strict=True)])
        if not len(gathered):
            raise InputError("all_gather: no rank has a row")
        if not features.is_floating_point():
            ctx.mark_non_differentiable(gathered)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        origin: Origin = ctx.origin
        gradient = torch.zeros_like(gradient) if origin.is_filler else (gradient * origin.weight).contiguous()
        if origin.world_size > 1:
            dist.all_reduce(gradient, group=origin.group)
        if origin.is_filler:
            return gradient.new_zeros(ctx.shape), None
        return (gradient[ctx.begin : ctx.end] / origin.weight).to(gradient.dtype), None
