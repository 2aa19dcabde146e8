"""reducescatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.compat.horovod.common.exceptions import HorovodInternalError
from lockstep.compat.horovod.torch.compression import Compression, Compressor
from lockstep.compat.horovod.torch.meta import Meta, tensor_facts
from lockstep.compat.horovod.torch.mpi_ops.gathers import start_all_gather
from lockstep.compat.horovod.torch.mpi_ops.handles import Pending, channel_of, check_tensors, issue
from lockstep.compat.horovod.torch.mpi_ops.reductions import Average, ReductionOp, Sum, check_op
from lockstep.compat.horovod.torch.process_sets import ProcessSet, global_process_set
from lockstep.compat.horovod.torch.request import Request

__all__ = ["grouped_reducescatter", "grouped_reducescatter_async", "reducescatter", "reducescatter_async"]


def _start(
    tensors: Sequence[torch.Tensor],
    is_single: bool,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> Pending:
    chosen = ReductionOp(op)
    if chosen not in (Average, Sum):
        raise HorovodInternalError(
            f"Reducescatter: op is {chosen.name}; only Average and Sum are supported. Use allreduce and select this "
            "rank's rows of its result"
        )
    channel = channel_of(process_set, "reducescatter")
    inputs = check_tensors(tensors, "reducescatter")
    check_op(chosen, inputs, process_set)
    meta = Meta(
        channel.full_name("reducescatter" if is_single else "grouped_reducescatter", name),
        "reducescatter",
        tuple(map(tensor_facts, inputs)),
        chosen.name,
        float(prescale_factor),
        float(postscale_factor),
    )
    return Pending(channel, Request(meta, inputs, is_single=is_single))


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start reducing a tensor over all ranks, and give each rank some rows; the input is not changed. Collective.

    Rows are divided evenly; if they do not divide, the first ranks get one more.

    Args:
        tensor: contiguous, with at least one dimension, the same shape and dtype on all ranks.
        name: matches the requests of ranks; without names they are matched by order.
        op: Average or Sum.
        process_set: the ranks that take part.
        prescale_factor: factor before the reduction; integers are multiplied in float64, and rounded towards zero.
        postscale_factor: factor after the reduction, likewise.

    Returns:
        A handle for `poll` and `synchronize`, which returns this rank's rows.

    Raises:
        InputError: the tensor is not supported, or the name is in use.
        HorovodInternalError: the operation is not supported.
    """
    return issue(_start([tensor], True, name, op, process_set, prescale_factor, postscale_factor))


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start reducing and scattering several tensors, all or none. Collective. See `reducescatter_async`."""
    return issue(_start(tensors, False, name, op, process_set, prescale_factor, postscale_factor))


class _Reducescatter(torch.autograd.Function):
    """Differentiable reducescatter, as in Horovod: gradients are gathered, and for Sum multiplied by world size."""

    @staticmethod
    def forward(
        ctx: Any,
        is_single: bool,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.process_set = process_set
        ctx.factor = prescale_factor * postscale_factor
        result = _start(tensors, is_single, name, op, process_set, prescale_factor, postscale_factor).wait()
        if op == Sum:
            ctx.factor *= process_set.size()
        return result if is_single else tuple(result)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        scaled = [(grad * ctx.factor).contiguous() for grad in grads]
        gathered = start_all_gather(scaled, False, None, ctx.process_set).wait()
        return (None, None, None, None, None, None, *gathered)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, and give each rank some rows. Collective and differentiable.

    Gradients of rows are gathered; for Sum they are multiplied by the number of ranks, as in Horovod.

    Args:
        tensor, name, op, process_set, prescale_factor, postscale_factor: see `reducescatter_async`.
        compression: `Compression.none` or `Compression.fp16`.

    Returns:
        This rank's rows.

    Raises:
        InputError: see `reducescatter_async`.
        HorovodInternalError: ranks disagree on shape, dtype or settings, or a rank was lost.
    """
    compressed, ctx = compression.compress(tensor)
    reduced = _Reducescatter.apply(  # type: ignore[no-untyped-call]
        True, name, op, process_set, prescale_factor, postscale_factor, compressed
    )
    return compression.decompress(reduced, ctx)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and scatter several tensors, all or none. Collective and differentiable. See `reducescatter`."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _Reducescatter.apply(  # type: ignore[no-untyped-call]
        False, name, op, process_set, prescale_factor, postscale_factor, *[compressed for compressed, _ in pairs]
    )
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]
