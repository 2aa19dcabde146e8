"""allreduce of dense tensors: single and grouped, in place and not, synchronous and asynchronous."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch

from lockstep.compat.horovod.common.exceptions import UnsupportedError
from lockstep.compat.horovod.torch import adasum, runtime
from lockstep.compat.horovod.torch.compression import Compression, Compressor
from lockstep.compat.horovod.torch.meta import Meta, tensor_facts
from lockstep.compat.horovod.torch.mpi_ops.handles import Pending, channel_of, check_tensors, issue
from lockstep.compat.horovod.torch.process_sets import ProcessSet, global_process_set
from lockstep.compat.horovod.torch.request import Request
from lockstep.errors import InputError

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReductionOp",
    "Sum",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "check_op",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]


class ReductionOp(IntEnum):
    """Reduction operations, equal to Horovod's plain numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average = ReductionOp.Average
Sum = ReductionOp.Sum
Adasum = ReductionOp.Adasum
Min = ReductionOp.Min
Max = ReductionOp.Max
Product = ReductionOp.Product


def _choose_op(op: int | None, average: bool | None) -> ReductionOp:
    """The operation given by `op` or `average`.

    Raises:
        InputError: both are given, or the operation is unknown.
    """
    if op is not None:
        if average is not None:
            raise InputError("The op parameter supersedes average. Please provide only one of them.")
        try:
            return ReductionOp(op)
        except ValueError:
            names = ", ".join(f"hvd.{one.name}" for one in ReductionOp)
            raise InputError(f"op is {op!r}; expected one of {names}") from None
    if average is None:
        return Average
    # To the caller of the public function.
    warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


def check_op(op: ReductionOp, tensors: Sequence[torch.Tensor], process_set: ProcessSet) -> None:
    """Check that an operation is supported.

    Raises:
        InputError: the dtype does not support the operation.
        UnsupportedError: Adasum over a subset of the ranks, or a number that is not a power of two. For tensors on
            GPUs, this is the number of hosts, which must have equally many ranks.
    """
    for tensor in tensors:
        is_float = tensor.dtype.is_floating_point
        if tensor.dtype == torch.bool or (op == Adasum and not is_float):
            raise InputError(f"Tensor type {tensor.type()} is not supported by allreduce with op={op.name}.")
    if op != Adasum:
        return
    if process_set is not global_process_set and process_set.process_set_id != 0:
        raise UnsupportedError("Adasum does not support non-global process sets yet.")
    if any(adasum.combines_hosts(tensor.device.type) for tensor in tensors):
        sizes = [len(ranks) for ranks in runtime.current().hosts]
        if len(set(sizes)) > 1:
            raise UnsupportedError(f"Running GPU Adasum on hosts with {sizes} ranks is not supported yet.")
        if not adasum.is_power_of_two(len(sizes)):
            raise UnsupportedError(
                f"Running GPU Adasum with non-power of 2 nodes is not supported yet: there are {len(sizes)}."
            )
        return
    size = global_process_set.size() or 1
    if not adasum.is_power_of_two(size):
        raise UnsupportedError(f"Running Adasum with non-power of 2 ranks is not supported yet: there are {size}.")


def _start(
    tensors: Sequence[torch.Tensor],
    is_in_place: bool,
    is_single: bool,
    name: str | None,
    op: ReductionOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Pending:
    channel = channel_of(process_set, "allreduce")
    inputs = check_tensors(tensors, "allreduce")
    check_op(op, inputs, process_set)
    outputs = list(tensors) if is_in_place else [torch.empty_like(tensor) for tensor in inputs]
    meta = Meta(
        channel.full_name("allreduce" if is_single else "grouped_allreduce", name),
        "allreduce",
        tuple(map(tensor_facts, inputs)),
        op.name,
        float(prescale_factor),
        float(postscale_factor),
    )
    # In place, the result is the caller's tensor, reduced outside of autograd.
    request = Request(meta, inputs, inputs if is_in_place else outputs, is_single)
    result = outputs[0] if is_single else outputs
    return Pending(channel, request, (lambda _: result) if is_in_place else None)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing a tensor over all ranks; the input is not changed. Collective.

    Args:
        tensor: contiguous, the same shape and dtype on all ranks.
        average: True for `op=Average`, False for `op=Sum`; deprecated.
        name: matches the requests of ranks, in any order; without names they are matched by order.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: factor before the reduction; integers are multiplied in float64, and rounded towards zero.
        postscale_factor: factor after the reduction, likewise.
        process_set: the ranks that take part.

    Returns:
        A handle for `poll` and `synchronize`, which returns a new tensor.

    Raises:
        InputError: both `average` and `op` are given, the tensor is not supported, or the name is in use.
        UnsupportedError: Adasum over a number of ranks that is not a power of two.
    """
    chosen = _choose_op(op, average)
    return issue(_start([tensor], False, True, name, chosen, prescale_factor, postscale_factor, process_set))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """`allreduce_async`, in place: `tensor` has the result once synchronized. Collective."""
    chosen = _choose_op(op, average)
    return issue(_start([tensor], True, True, name, chosen, prescale_factor, postscale_factor, process_set))


class _Allreduce(torch.autograd.Function):
    """Differentiable allreduce: gradients are reduced in the same way."""

    @staticmethod
    def forward(
        ctx: Any,
        is_single: bool,
        name: str | None,
        op: ReductionOp,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.is_single = is_single
        ctx.settings = (op, prescale_factor, postscale_factor, process_set)
        result = _start(tensors, False, is_single, name, *ctx.settings).wait()
        return result if is_single else tuple(result)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dense = [grad.contiguous() for grad in grads]
        reduced = _Allreduce.apply(ctx.is_single, None, *ctx.settings, *dense)  # type: ignore[no-untyped-call]
        return (None, None, None, None, None, None, *((reduced,) if ctx.is_single else reduced))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks; the input is not changed. Collective and differentiable.

    The gradient is reduced over ranks in the same way.

    Args:
        tensor: contiguous, the same shape and dtype on all ranks.
        average, name, op, prescale_factor, postscale_factor, process_set: see `allreduce_async`.
        compression: `Compression.none` or `Compression.fp16`.

    Returns:
        A new tensor.

    Raises:
        InputError, UnsupportedError: see `allreduce_async`.
        HorovodInternalError: ranks disagree on shape, dtype or settings, or a rank was lost.
    """
    chosen = _choose_op(op, average)
    compressed, ctx = compression.compress(tensor)
    reduced = _Allreduce.apply(  # type: ignore[no-untyped-call]
        True, name, chosen, prescale_factor, postscale_factor, process_set, compressed
    )
    return compression.decompress(reduced, ctx)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, in place; returns it. Collective. See `allreduce`."""
    chosen = _choose_op(op, average)
    result: torch.Tensor = _start(
        [tensor], True, True, name, chosen, prescale_factor, postscale_factor, process_set
    ).wait()
    return result


# ---- several tensors at once ---------------------------------------------------------------------


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing several tensors, all or none. Collective. See `allreduce_async`; the result is a list."""
    chosen = _choose_op(op, average)
    return issue(_start(tensors, False, False, name, chosen, prescale_factor, postscale_factor, process_set))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """`grouped_allreduce_async`, in place. Collective."""
    chosen = _choose_op(op, average)
    return issue(_start(tensors, True, False, name, chosen, prescale_factor, postscale_factor, process_set))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors over all ranks, all or none. Collective and differentiable. See `allreduce`."""
    chosen = _choose_op(op, average)
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _Allreduce.apply(  # type: ignore[no-untyped-call]
        False, name, chosen, prescale_factor, postscale_factor, process_set, *[compressed for compressed, _ in pairs]
    )
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors over all ranks, in place; returns them. Collective. See `allreduce`."""
    chosen = _choose_op(op, average)
    result: list[torch.Tensor] = _start(
        tensors, True, False, name, chosen, prescale_factor, postscale_factor, process_set
    ).wait()
    return result
