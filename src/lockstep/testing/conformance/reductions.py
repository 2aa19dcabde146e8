"""all_reduce, reduce and reduce_scatter, in every variant."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist

from lockstep.testing.conformance.case import (
    ALL_DTYPES,
    LARGE_NUMEL,
    OPS_BY_DTYPE,
    Case,
    Context,
    Shape,
    case,
    coalescing,
    expect_equal,
    finish,
    inputs_of,
    reduced,
    spread_out,
)

__all__ = [
    "CASES",
    "check_all_reduce",
    "check_all_reduce_coalesced",
    "check_all_reduce_strided",
    "check_coalescing_manager_all_reduce",
    "check_coalescing_manager_reduce_scatter",
    "check_reduce",
    "check_reduce_scatter",
    "check_reduce_scatter_strided",
    "check_reduce_scatter_tensor",
    "check_reduce_scatter_tensor_old_name",
    "check_repeatable",
    "check_wide_accumulation",
]

_SHAPES: tuple[Shape, ...] = ((), (0,), (1,), (3, 5, 7), (1023,), (65537,), (LARGE_NUMEL,))


def _op(name: str) -> dist.ReduceOp.RedOpType:
    op: dist.ReduceOp.RedOpType = getattr(dist.ReduceOp, name)
    return op


def _roundings(op: str) -> int:
    """An average may be a divided sum or a sum of quotients; both are rounded, as is the expected value."""
    return 4 if op == "AVG" else 0


def _everybodys(context: Context, shape: Shape, dtype: torch.dtype, op: str, salt: int = 0) -> list[torch.Tensor]:
    return [inputs_of(rank, shape, dtype, op, salt) for rank in range(context.world_size)]


def check_all_reduce(context: Context, op: str, dtype: torch.dtype, shape: Shape, async_op: bool = False) -> None:
    """Every rank ends with the reduction of all ranks' tensors.

    Expected: rank r holds x_r; afterwards each holds x_0 ∘ x_1 ∘ … ∘ x_{W-1} for an operation ∘,
    and (x_0 + … + x_{W-1}) / W for AVG.
    """
    tensors = _everybodys(context, shape, dtype, op)
    tensor = tensors[context.rank].clone()
    work = dist.all_reduce(tensor, _op(op), group=context.group, async_op=async_op)
    finish(work, async_op)
    expect_equal(tensor, reduced(op, tensors), "the tensor", roundings=_roundings(op))


def check_all_reduce_strided(context: Context, layout: str) -> None:
    """all_reduce of a tensor that is not contiguous: only its own elements change.

    Expected: as for a contiguous tensor. "transposed" is dense in another order of dimensions; "strided" has gaps,
    whose content stays 0.
    """
    tensors = _everybodys(context, (6, 10), torch.float32, "SUM")
    mine = tensors[context.rank]
    tensor = mine.t().contiguous().t() if layout == "transposed" else spread_out(mine)
    dist.all_reduce(tensor, group=context.group)
    expect_equal(tensor, reduced("SUM", tensors), "the tensor")
    if layout == "strided":
        gaps = tensor.as_strided((6, 10), tensor.stride(), tensor.storage_offset() + 1)
        expect_equal(gaps, torch.zeros(6, 10), "the gap between the elements")


def check_all_reduce_coalesced(context: Context, async_op: bool) -> None:
    """Several tensors in one call give the same results as one call per tensor.

    Expected: for tensor i with salt i, the sum over ranks, as in check_all_reduce.
    """
    shapes: tuple[Shape, ...] = ((4,), (2, 3), (), (1000,))
    everybodys = [_everybodys(context, shape, torch.float32, "SUM", salt) for salt, shape in enumerate(shapes)]
    mine = [tensors[context.rank].clone() for tensors in everybodys]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        future = dist.all_reduce_coalesced(mine, group=context.group, async_op=async_op)
    finish(future, async_op)
    for index, (tensor, tensors) in enumerate(zip(mine, everybodys, strict=True)):
        expect_equal(tensor, reduced("SUM", tensors), f"tensor {index}")


def check_coalescing_manager_all_reduce(context: Context) -> None:
    """Calls collected by torch's coalescing manager have finished after a wait for its handle.

    Expected: as for check_all_reduce, for each of three tensors.
    """
    everybodys = [_everybodys(context, (5 + salt,), torch.float32, "SUM", salt) for salt in range(3)]
    mine = [tensors[context.rank].clone() for tensors in everybodys]
    with coalescing(context.process_group) as manager:
        for tensor in mine:
            dist.all_reduce(tensor, group=context.group)
    manager.wait()
    for index, (tensor, tensors) in enumerate(zip(mine, everybodys, strict=True)):
        expect_equal(tensor, reduced("SUM", tensors), f"tensor {index}")


def check_reduce(context: Context, op: str, dtype: torch.dtype, shape: Shape, async_op: bool = False) -> None:
    """Each rank in turn is the root and receives the reduction; the tensors of the others are undefined.

    Expected on the root: as in check_all_reduce. With root r the inputs have salt r, so that a result left over from
    the previous round would not pass.
    """
    for root in range(context.world_size):
        tensors = _everybodys(context, shape, dtype, op, salt=root)
        tensor = tensors[context.rank].clone()
        work = dist.reduce(tensor, context.global_rank(root), _op(op), group=context.group, async_op=async_op)
        finish(work, async_op)
        if context.rank == root:
            expect_equal(tensor, reduced(op, tensors), f"root {root}'s tensor", roundings=_roundings(op))


def _parts_from(context: Context, shape: Shape, dtype: torch.dtype, op: str) -> list[torch.Tensor]:
    """This rank's contributions to each rank's output."""
    return [inputs_of(context.rank, shape, dtype, op, salt=receiver) for receiver in range(context.world_size)]


def _reduced_part(context: Context, shape: Shape, dtype: torch.dtype, op: str) -> torch.Tensor:
    """The expected output of this rank: the reduction of all ranks' contributions to it."""
    return reduced(op, _everybodys(context, shape, dtype, op, salt=context.rank))


def check_reduce_scatter(context: Context, op: str, dtype: torch.dtype, shape: Shape, async_op: bool = False) -> None:
    """The variant with lists: rank r receives the reduction of all ranks' r-th tensors.

    Expected on rank r: p[0][r] ∘ p[1][r] ∘ … where p[s] is the list of rank s. The lists themselves are unchanged.
    """
    parts = _parts_from(context, shape, dtype, op)
    mine = [part.clone() for part in parts]
    output = torch.full(shape, 1, dtype=dtype)
    work = dist.reduce_scatter(output, mine, _op(op), group=context.group, async_op=async_op)
    finish(work, async_op)
    expect_equal(output, _reduced_part(context, shape, dtype, op), "the output", roundings=_roundings(op))
    for index, (after, before) in enumerate(zip(mine, parts, strict=True)):
        expect_equal(after, before, f"input {index} after the call")


def check_reduce_scatter_tensor(
    context: Context, op: str, dtype: torch.dtype, shape: Shape, form: str = "concatenated", async_op: bool = False
) -> None:
    """The variant with one input tensor, in which the parts are either concatenated or stacked.

    Expected: as in check_reduce_scatter with the parts cut from the input along dimension 0.
    """
    parts = _parts_from(context, shape, dtype, op)
    join = torch.stack if form == "stacked" else torch.cat
    mine = join(parts)
    output = torch.full(shape, 1, dtype=dtype)
    work = _reduce_scatter_single(output, mine, _op(op), group=context.group, async_op=async_op)
    finish(work, async_op)
    expect_equal(output, _reduced_part(context, shape, dtype, op), "the output", roundings=_roundings(op))
    expect_equal(mine, join(parts), "the input after the call")


# torch 2.13 renamed the variant for tensors.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def check_reduce_scatter_tensor_old_name(context: Context) -> None:
    """`dist.reduce_scatter_tensor` itself, which has another name in later releases of torch.

    Expected: as in check_reduce_scatter_tensor.
    """
    mine = torch.cat(_parts_from(context, (4,), torch.float32, "SUM"))
    output = torch.zeros(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.reduce_scatter_tensor(output, mine, group=context.group)
    expect_equal(output, _reduced_part(context, (4,), torch.float32, "SUM"), "the output")


def check_coalescing_manager_reduce_scatter(context: Context) -> None:
    """Two reduce_scatter calls collected by torch's coalescing manager.

    Expected: as in check_reduce_scatter_tensor, for both.
    """
    shapes: tuple[Shape, ...] = ((3,), (4,))
    outputs = [torch.zeros(shape) for shape in shapes]
    with coalescing(context.process_group) as manager:
        for shape, output in zip(shapes, outputs, strict=True):
            mine = torch.cat(_parts_from(context, shape, torch.float32, "SUM"))
            _reduce_scatter_single(output, mine, group=context.group)
    manager.wait()
    for index, (shape, output) in enumerate(zip(shapes, outputs, strict=True)):
        expect_equal(output, _reduced_part(context, shape, torch.float32, "SUM"), f"output {index}")


def check_reduce_scatter_strided(context: Context) -> None:
    """reduce_scatter from and into tensors with gaps between their elements.

    Expected: as in check_reduce_scatter.
    """
    shape = (4, 6)
    output = spread_out(torch.zeros(shape))
    mine = [spread_out(part) for part in _parts_from(context, shape, torch.float32, "SUM")]
    dist.reduce_scatter(output, mine, group=context.group)
    expect_equal(output, _reduced_part(context, shape, torch.float32, "SUM"), "the output")


def check_wide_accumulation(context: Context, dtype: torch.dtype) -> None:
    """16-bit floats are added in wider arithmetic and rounded once.

    Expected: rank 0 holds the power of two B at which the dtype's spacing becomes 2, the others hold 1. Added in the
    dtype, B + 1 rounds back to B every time; the exact sum is B + W - 1, which for W = 3 is B + 2, representable in the
    dtype. Ranks above 2 hold 0.
    """
    spacing_two = 2.0 / torch.finfo(dtype).eps
    values = [spacing_two, 1.0, 1.0] + [0.0] * (context.world_size - 3)
    tensor = torch.full((33,), values[context.rank], dtype=dtype)
    dist.all_reduce(tensor, group=context.group)
    expect_equal(tensor, torch.full((33,), spacing_two + 2.0, dtype=dtype), "the sum")


def check_repeatable(context: Context, numel: int) -> None:
    """all_reduce of arbitrary floats gives the same bits on every rank and in three runs.

    Expected: no particular value; the bits of the first run on rank 0 are broadcast, and must be repeated.
    """
    generator = torch.Generator().manual_seed(context.rank)
    mine = torch.randn(numel, generator=generator) * torch.logspace(-6, 6, numel)
    reference = torch.empty(0)
    for run in range(3):
        tensor = mine.clone()
        dist.all_reduce(tensor, group=context.group)
        if run == 0:
            reference = tensor.clone()
            dist.broadcast(reference, context.global_rank(0), group=context.group)
        expect_equal(tensor.view(torch.int32), reference.view(torch.int32), f"the bits of run {run}")


def _cases() -> Iterator[Case]:
    for dtype in ALL_DTYPES:
        for op in OPS_BY_DTYPE[dtype]:
            yield case(check_all_reduce, op=op, dtype=dtype, shape=(17,))
            yield case(check_reduce, op=op, dtype=dtype, shape=(9,))
            yield case(check_reduce_scatter_tensor, op=op, dtype=dtype, shape=(5,))
    for shape in _SHAPES:
        yield case(check_all_reduce, op="SUM", dtype=torch.float32, shape=shape)
        yield case(check_reduce_scatter, op="SUM", dtype=torch.float32, shape=shape)
        if shape:
            yield case(check_reduce_scatter_tensor, op="SUM", dtype=torch.float32, shape=shape)
    for shape in ((), (0,), (3, 5), (LARGE_NUMEL,)):
        yield case(check_reduce, op="SUM", dtype=torch.float32, shape=shape)
    yield case(check_all_reduce, op="MAX", dtype=torch.int64, shape=(65537,))
    yield case(check_all_reduce, op="SUM", dtype=torch.bfloat16, shape=(LARGE_NUMEL,))
    for async_check in (check_all_reduce, check_reduce, check_reduce_scatter, check_reduce_scatter_tensor):
        yield case(async_check, op="SUM", dtype=torch.float64, shape=(33,), async_op=True)
    yield case(check_reduce_scatter_tensor, op="SUM", dtype=torch.float32, shape=(2, 3), form="stacked")
    yield case(check_reduce_scatter_tensor, op="MAX", dtype=torch.float32, shape=(2, 3), form="stacked")
    yield case(check_reduce_scatter, op="MIN", dtype=torch.int32, shape=(4, 2))
    yield case(check_reduce_scatter_tensor_old_name, "reduce_scatter_tensor")
    yield case(check_all_reduce_strided, layout="transposed")
    yield case(check_all_reduce_strided, "gaps_in_memory", layout="strided")
    yield case(check_reduce_scatter_strided, "gaps_in_memory", "reduce_scatter")
    for async_op in (False, True):
        yield case(check_all_reduce_coalesced, async_op=async_op)
    yield case(check_coalescing_manager_all_reduce, "coalescing_manager")
    yield case(check_coalescing_manager_reduce_scatter, "coalescing_manager", "reduce_scatter_tensor")
    for dtype in (torch.float16, torch.bfloat16):
        yield case(check_wide_accumulation, min_world_size=3, dtype=dtype)
    for numel in (257, 65537, LARGE_NUMEL):
        yield case(check_repeatable, numel=numel)


CASES: tuple[Case, ...] = tuple(_cases())
