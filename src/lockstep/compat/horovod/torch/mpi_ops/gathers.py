"""allgather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.compat.horovod.torch.meta import Meta, tensor_facts
from lockstep.compat.horovod.torch.mpi_ops.handles import Pending, channel_of, check_tensors, issue
from lockstep.compat.horovod.torch.mpi_ops.reductions import Average, grouped_allreduce
from lockstep.compat.horovod.torch.process_sets import ProcessSet, global_process_set
from lockstep.compat.horovod.torch.request import Request

__all__ = ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async", "start_all_gather"]


def start_all_gather(
    tensors: Sequence[torch.Tensor], is_single: bool, name: str | None, process_set: ProcessSet
) -> Pending:
    """Submit an allgather. See `allgather_async`."""
    channel = channel_of(process_set, "allgather")
    inputs = check_tensors(tensors, "allgather")
    full_name = channel.full_name("allgather" if is_single else "grouped_allgather", name)
    meta = Meta(full_name, "allgather", tuple(map(tensor_facts, inputs)))
    return Pending(channel, Request(meta, inputs, is_single=is_single))


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start concatenating the tensors of all ranks along the first dimension. Collective.

    Args:
        tensor: contiguous, with at least one dimension; the first may differ between ranks.
        name: matches the requests of ranks; without names they are matched by order.
        process_set: the ranks that take part.

    Returns:
        A handle for `poll` and `synchronize`, which returns a new tensor.

    Raises:
        InputError: the tensor is not supported, or the name is in use.
    """
    return issue(start_all_gather([tensor], True, name, process_set))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start gathering several tensors, all or none. Collective. See `allgather_async`; the result is a list."""
    return issue(start_all_gather(tensors, False, name, process_set))


class _Allgather(torch.autograd.Function):
    """Differentiable allgather, as in Horovod: the gradient is this rank's rows of the *mean* over ranks."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, is_single: bool, *tensors: torch.Tensor) -> Any:
        ctx.process_set, ctx.rows = process_set, [tensor.size(0) if tensor.dim() else 0 for tensor in tensors]
        result = start_all_gather(tensors, is_single, name, process_set).wait()
        return result if is_single else tuple(result)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        means = grouped_allreduce([grad.contiguous() for grad in grads], op=Average, process_set=ctx.process_set)
        rank, size = ctx.process_set.rank(), ctx.process_set.size()
        table = (
            start_all_gather([torch.tensor(ctx.rows, device="cpu")], True, None, ctx.process_set).wait().view(size, -1)
        )
        starts = table[:rank].sum(0).tolist()
        own = [mean.narrow(0, first, rows) for mean, first, rows in zip(means, starts, ctx.rows, strict=True)]
        return (None, None, None, *own)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the first dimension. Collective and differentiable.

    The gradient is this rank's rows of the mean over ranks.

    Args:
        tensor, name, process_set: see `allgather_async`.

    Returns:
        A new tensor: rows of rank 0, then of rank 1, …

    Raises:
        InputError: see `allgather_async`.
        HorovodInternalError: ranks disagree on dtype or on dimensions after the first, or a rank was lost.
    """
    result: torch.Tensor = _Allgather.apply(name, process_set, True, tensor)  # type: ignore[no-untyped-call]
    return result


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gather several tensors, all or none. Collective and differentiable. See `allgather`."""
    return list(_Allgather.apply(name, process_set, False, *tensors))  # type: ignore[no-untyped-call]
