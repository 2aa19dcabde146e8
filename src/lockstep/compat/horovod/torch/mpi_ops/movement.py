"""allgather, broadcast, alltoall."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.compat.horovod.torch.meta import Meta, tensor_facts
from lockstep.compat.horovod.torch.mpi_ops.handles import Pending, channel_of, check_tensors, issue, start
from lockstep.compat.horovod.torch.process_sets import ProcessSet, global_process_set
from lockstep.compat.horovod.torch.request import Request
from lockstep.errors import InputError

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "start_all_gather",
    "start_broadcast",
]


# ---- allgather -----------------------------------------------------------------------------------


def start_all_gather(
    tensors: Sequence[torch.Tensor], is_single: bool, name: str | None, process_set: ProcessSet
) -> Pending:
    """Submit an allgather. See `allgather_async`."""
    channel = channel_of(process_set, "allgather")
    inputs = check_tensors(tensors, "allgather")
    full_name = channel.full_name("allgather" if is_single else "grouped_allgather", name)
    meta = Meta(full_name, "allgather", tuple(map(tensor_facts, inputs)))
    return start(channel, Request(meta, inputs, is_single=is_single))


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start gathering a tensor of every rank, one below the other. Collective.

    Args:
        tensor: contiguous, at least one dimension; the first may differ between ranks.
        name: requests of one name belong together; without one they are counted.
        process_set: who takes part.

    Returns:
        A handle for `poll` and `synchronize`, which returns a new tensor.

    Raises:
        InputError: a tensor that cannot travel, or a name that is in use.
    """
    return issue(start_all_gather([tensor], True, name, process_set))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start gathering several tensors, all or none. Collective. See `allgather_async`; yields a list."""
    return issue(start_all_gather(tensors, False, name, process_set))


class _Allgather(torch.autograd.Function):
    """Differentiable, as Horovod does it: the *mean* over ranks of the gradient, and of that this rank's rows."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, is_single: bool, *tensors: torch.Tensor) -> Any:
        ctx.process_set, ctx.rows = process_set, [tensor.size(0) if tensor.dim() else 0 for tensor in tensors]
        result = start_all_gather(tensors, is_single, name, process_set).wait()
        return result if is_single else tuple(result)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        from lockstep.compat.horovod.torch.mpi_ops.reductions import Average, grouped_allreduce

        means = grouped_allreduce([grad.contiguous() for grad in grads], op=Average, process_set=ctx.process_set)
        rank, size = ctx.process_set.rank(), ctx.process_set.size()
        table = start_all_gather([torch.tensor(ctx.rows)], True, None, ctx.process_set).wait().view(size, -1)
        starts = table[:rank].sum(0).tolist()
        own = [mean.narrow(0, first, rows) for mean, first, rows in zip(means, starts, ctx.rows, strict=True)]
        return (None, None, None, *own)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Gather a tensor of every rank, one below the other. Collective and differentiable.

    The gradient is averaged over ranks, and this rank's rows of it are its own.

    Args:
        tensor, name, process_set: see `allgather_async`.

    Returns:
        A new tensor: rows of rank 0, then of rank 1, …

    Raises:
        InputError: see `allgather_async`.
        HorovodInternalError: ranks disagree on dtype or on another dimension than the first, or a rank is gone.
    """
    result: torch.Tensor = _Allgather.apply(name, process_set, True, tensor)  # type: ignore[no-untyped-call]
    return result


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gather several tensors, all or none. Collective and differentiable. See `allgather`."""
    return list(_Allgather.apply(name, process_set, False, *tensors))  # type: ignore[no-untyped-call]


# ---- broadcast -----------------------------------------------------------------------------------


def start_broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, is_in_place: bool
) -> Pending:
    """Submit a broadcast. See `broadcast_async`."""
    channel = channel_of(process_set, "broadcast")
    if root_rank not in channel.ranks:
        raise InputError(
            f"broadcast received invalid root rank {root_rank} for provided process set of ranks {list(channel.ranks)}"
        )
    inputs = check_tensors([tensor], "broadcast")
    outputs = inputs if is_in_place else [torch.empty_like(inputs[0])]
    meta = Meta(
        channel.full_name("broadcast", name), "broadcast", tuple(map(tensor_facts, inputs)), root=int(root_rank)
    )
    finish: Callable[[Any], Any] | None = None
    if is_in_place:

        def finish(_: Any) -> Any:
            return tensor

    return start(channel, Request(meta, inputs, outputs), finish)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start copying a tensor of one rank to all; the inputs are left alone. Collective.

    Args:
        tensor: contiguous, the same shape and dtype on all ranks.
        root_rank: global rank whose tensor it is, the same on all ranks.
        name: requests of one name belong together; without one they are counted.
        process_set: who takes part.

    Returns:
        A handle for `poll` and `synchronize`, which returns a new tensor.

    Raises:
        InputError: a root outside the set, a tensor that cannot travel, or a name that is in use.
    """
    return issue(start_broadcast(tensor, root_rank, name, process_set, False))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """`broadcast_async`, in place. Collective."""
    return issue(start_broadcast(tensor, root_rank, name, process_set, True))


class _Broadcast(torch.autograd.Function):
    """Differentiable, as Horovod does it: the root gets the *mean* of the gradients, others get zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return start_broadcast(tensor, root_rank, name, process_set, False).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        from lockstep.compat.horovod.torch.mpi_ops.reductions import Average, allreduce

        mean = allreduce(grad.contiguous(), op=Average, process_set=ctx.process_set)
        ranks = channel_of(ctx.process_set, "broadcast").ranks
        is_root = ranks[ctx.process_set.rank()] == ctx.root_rank
        return mean if is_root else torch.zeros_like(mean), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copy a tensor of one rank to all; the inputs are left alone. Collective and differentiable.

    The root's gradient is the mean of all; that of the others is zero.

    Args:
        tensor, root_rank, name, process_set: see `broadcast_async`.

    Returns:
        A new tensor.

    Raises:
        InputError: see `broadcast_async`.
        HorovodInternalError: ranks disagree on shape, dtype or root, or a rank is gone.
    """
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return result


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copy a tensor of one rank to all in place, and return it. Collective. See `broadcast`."""
    result: torch.Tensor = start_broadcast(tensor, root_rank, name, process_set, True).wait()
    return result


# ---- alltoall ------------------------------------------------------------------------------------


def _check_splits(tensor: torch.Tensor, splits: torch.Tensor | None, size: int) -> tuple[int, ...]:
    """Rows for each rank.

    Raises:
        InputError: they do not fit the tensor or the number of ranks.
    """
    if tensor.dim() == 0:
        return (0,) * size  # An error on all ranks, which the ranks find together.
    rows = tensor.size(0)
    if splits is None:
        if rows % size:
            raise InputError(
                f"splits not provided, but first dimension of tensor is not an even multiple of the number of workers: "
                f"{rows} rows, {size} workers"
            )
        return (rows // size,) * size
    if splits.dim() != 1:
        raise InputError(f"alltoall expects a 1D splits tensor, got {splits.dim()} dimensions")
    if splits.dtype != torch.int32:
        raise InputError(f"alltoall expects splits to contain 32-bit integer elements, got {splits.dtype}")
    numbers = tuple(splits.tolist())
    if len(numbers) != size:
        raise InputError(f"Number of entries in splits does not equal number of workers: {len(numbers)}, {size}")
    if min(numbers) < 0:
        raise InputError(f"splits must not be negative, got {list(numbers)}")
    if sum(numbers) > rows:
        raise InputError(
            f"Sum of splits entries is greater than the first dimension of tensor: {sum(numbers)} of {rows} rows"
        )
    return numbers


def _start_all_to_all(tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Pending:
    channel = channel_of(process_set, "alltoall")
    inputs = check_tensors([tensor], "alltoall")
    given = splits
    if given is not None and not isinstance(given, torch.Tensor):
        given = torch.tensor(given, dtype=torch.int32)
    numbers = _check_splits(tensor, given, len(channel.ranks))
    meta = Meta(channel.full_name("alltoall", name), "alltoall", tuple(map(tensor_facts, inputs)), splits=numbers)

    def finish(result: Any) -> Any:
        output, received = result
        if given is None:
            return output
        return output, torch.tensor(received, dtype=torch.int32, device=given.device)

    return start(channel, Request(meta, inputs), finish)


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start sending rows of a tensor to every rank. Collective.

    Args:
        tensor: contiguous; the first rows go to rank 0, the next to rank 1, …
        splits: int32 tensor or list: rows for each rank; without it, equally many.
        name: requests of one name belong together; without one they are counted.
        process_set: who takes part.

    Returns:
        A handle for `poll` and `synchronize`, which returns the rows received, in the order of ranks; with `splits`, a
        tuple of them and an int32 tensor that says how many came from each rank.

    Raises:
        InputError: splits that do not fit, a tensor that cannot travel, or a name that is in use.
    """
    return issue(_start_all_to_all(tensor, splits, name, process_set))


class _Alltoall(torch.autograd.Function):
    """Differentiable: the gradient's rows go back to where they came from."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        size = len(channel_of(process_set, "alltoall").ranks)
        given = splits
        if given is None:
            numbers = _check_splits(tensor, None, size)
            given = torch.tensor(numbers, dtype=torch.int32)
        output, received = _start_all_to_all(tensor, given, name, process_set).wait()
        ctx.process_set, ctx.received, ctx.rows = process_set, received, tensor.size(0)
        if splits is None:
            return output
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        rows, _sent = _start_all_to_all(grad.contiguous(), ctx.received, None, ctx.process_set).wait()
        if rows.size(0) < ctx.rows:  # Rows that went to nobody have no gradient.
            rows = torch.cat([rows, rows.new_zeros((ctx.rows - rows.size(0), *rows.shape[1:]))])
        return rows, None, None, None


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send rows of a tensor to every rank. Collective and differentiable.

    The gradient's rows go back to where they came from.

    Args:
        tensor, splits, name, process_set: see `alltoall_async`.

    Returns:
        The rows received; with `splits`, a tuple of them and the number from each rank.

    Raises:
        InputError: see `alltoall_async`.
        HorovodInternalError: ranks disagree on dtype or on another dimension than the first, or a rank is gone.
    """
    return _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
