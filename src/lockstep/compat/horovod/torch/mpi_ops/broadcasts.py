"""broadcast."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.compat.horovod.torch.meta import Meta, tensor_facts
from lockstep.compat.horovod.torch.mpi_ops.handles import Pending, channel_of, check_tensors, issue
from lockstep.compat.horovod.torch.mpi_ops.reductions import Average, allreduce
from lockstep.compat.horovod.torch.process_sets import ProcessSet, global_process_set
from lockstep.compat.horovod.torch.request import Request
from lockstep.errors import InputError

__all__ = ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "start_broadcast"]


def start_broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, is_in_place: bool
) -> Pending:
    """Submit a broadcast. See `broadcast_async`."""
    channel = channel_of(process_set, "broadcast")
    if root_rank not in channel.ranks:
        raise InputError(
            f"broadcast received invalid root rank {root_rank!r} for provided process set of ranks {[*channel.ranks]}"
        )
    inputs = check_tensors([tensor], "broadcast")
    outputs = inputs if is_in_place else [torch.empty_like(inputs[0])]
    meta = Meta(
        channel.full_name("broadcast", name), "broadcast", tuple(map(tensor_facts, inputs)), root=int(root_rank)
    )
    return Pending(channel, Request(meta, inputs, outputs), (lambda _: tensor) if is_in_place else None)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start copying a tensor of one rank to all; inputs are not changed. Collective.

    Args:
        tensor: contiguous, the same shape and dtype on all ranks.
        root_rank: global rank to copy from, the same on all ranks.
        name: matches the requests of ranks; without names they are matched by order.
        process_set: the ranks that take part.

    Returns:
        A handle for `poll` and `synchronize`, which returns a new tensor.

    Raises:
        InputError: the root is not in the set, the tensor is not supported, or the name is in use.
    """
    return issue(start_broadcast(tensor, root_rank, name, process_set, False))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """`broadcast_async`, in place. Collective."""
    return issue(start_broadcast(tensor, root_rank, name, process_set, True))


class _Broadcast(torch.autograd.Function):
    """Differentiable broadcast, as in Horovod: the root gets the *mean* of the gradients, others get zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return start_broadcast(tensor, root_rank, name, process_set, False).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        mean = allreduce(grad.contiguous(), op=Average, process_set=ctx.process_set)
        ranks = channel_of(ctx.process_set, "broadcast").ranks
        is_root = ranks[ctx.process_set.rank()] == ctx.root_rank
        return mean if is_root else torch.zeros_like(mean), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copy a tensor of one rank to all; inputs are not changed. Collective and differentiable.

    The root's gradient is the mean over ranks; that of other ranks is zero.

    Args:
        tensor, root_rank, name, process_set: see `broadcast_async`.

    Returns:
        A new tensor.

    Raises:
        InputError: see `broadcast_async`.
        HorovodInternalError: ranks disagree on shape, dtype or root, or a rank was lost.
    """
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return result


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copy a tensor of one rank to all, in place; returns it. Collective. See `broadcast`."""
    result: torch.Tensor = start_broadcast(tensor, root_rank, name, process_set, True).wait()
    return result
