"""alltoall."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.compat.horovod.torch.meta import Meta, tensor_facts
from lockstep.compat.horovod.torch.mpi_ops.handles import Pending, channel_of, check_tensors, issue
from lockstep.compat.horovod.torch.process_sets import ProcessSet, global_process_set
from lockstep.compat.horovod.torch.request import Request
from lockstep.errors import InputError

__all__ = ["alltoall", "alltoall_async"]


def _check_splits(tensor: torch.Tensor, splits: torch.Tensor | None, size: int) -> tuple[int, ...]:
    """The number of rows for each rank.

    Raises:
        InputError: they do not fit the tensor or the number of ranks.
    """
    if tensor.dim() == 0:
        return (0,) * size  # An error on all ranks, which the comparison of requests finds.
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
        given = torch.tensor(given, dtype=torch.int32, device="cpu")
    numbers = _check_splits(tensor, given, len(channel.ranks))
    meta = Meta(channel.full_name("alltoall", name), "alltoall", tuple(map(tensor_facts, inputs)), splits=numbers)

    def finish(result: Any) -> Any:
        output, received = result
        if given is None:
            return output
        return output, torch.tensor(received, dtype=torch.int32, device=given.device)

    return Pending(channel, Request(meta, inputs), finish)


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start sending rows of a tensor to every rank. Collective.

    Args:
        tensor: contiguous; its first rows go to rank 0, the next to rank 1, …
        splits: int32 tensor or list with the number of rows for each rank; by default equal parts.
        name: matches the requests of ranks; without names they are matched by order.
        process_set: the ranks that take part.

    Returns:
        A handle for `poll` and `synchronize`, which returns the received rows in the order of ranks; with `splits`, a
        tuple of these and an int32 tensor with the number of rows from each rank.

    Raises:
        InputError: `splits` does not fit, the tensor is not supported, or the name is in use.
    """
    return issue(_start_all_to_all(tensor, splits, name, process_set))


class _Alltoall(torch.autograd.Function):
    """Differentiable alltoall: the gradient's rows are sent back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        size = len(channel_of(process_set, "alltoall").ranks)
        given = splits
        if given is None:
            numbers = _check_splits(tensor, None, size)
            given = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        output, received = _start_all_to_all(tensor, given, name, process_set).wait()
        ctx.process_set, ctx.received, ctx.rows = process_set, received, tensor.size(0)
        if splits is None:
            return output
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        rows, _sent = _start_all_to_all(grad.contiguous(), ctx.received, None, ctx.process_set).wait()
        if rows.size(0) < ctx.rows:  # Rows that were not sent have no gradient.
            rows = torch.cat([rows, rows.new_zeros((ctx.rows - rows.size(0), *rows.shape[1:]))])
        return rows, None, None, None


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send rows of a tensor to every rank. Collective and differentiable.

    In the backward pass, the gradient's rows are sent back.

    Args:
        tensor, splits, name, process_set: see `alltoall_async`.

    Returns:
        The received rows; with `splits`, a tuple of these and their number from each rank.

    Raises:
        InputError: see `alltoall_async`.
        HorovodInternalError: ranks disagree on dtype or on dimensions after the first, or a rank was lost.
    """
    return _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
