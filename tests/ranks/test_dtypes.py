"""Every dtype that torch has on the CPU, in every verb; every reduction that makes sense, and an error for the rest."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from ddp_checks import warnings_of_lockstep
from lockstep.errors import InputTypeError
from lockstep.testing import run_ranks

WORLD_SIZE = 3


def _named(*names: str) -> list[torch.dtype]:
    return [getattr(torch, name) for name in names if hasattr(torch, name)]


FLOATS = _named("float64", "float32", "float16", "bfloat16")
FLOAT8 = _named("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
INTEGERS = _named("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
# with arithmetic, so that there is a mean
COUNTS = _named("int8", "int16", "int32", "int64", "uint8")
COMPLEX = _named("complex32", "complex64", "complex128")
# Stored by torch, without arithmetic.
OTHERS = _named("bits8", "bits16", "float4_e2m1fn_x2", "int1", "int4", "int7", "uint2", "uint7")
ALL = [*FLOATS, *FLOAT8, *INTEGERS, torch.bool, *COMPLEX, *OTHERS]


def filled(dtype: torch.dtype, rank: int, numel: int = 37) -> torch.Tensor:
    """Bytes that differ between ranks and are valid in every dtype."""
    source = (torch.arange(numel * dtype.itemsize) * 5 + rank * 3) % (2 if dtype is torch.bool else 64)
    return source.to(torch.uint8).view(dtype)


def empty(dtype: torch.dtype, numel: int = 37) -> torch.Tensor:
    return torch.full((numel * dtype.itemsize,), 1, dtype=torch.uint8).view(dtype)


def expect(received: torch.Tensor, rank: int, what: str) -> None:
    expected = filled(received.dtype, rank)
    assert torch.equal(received.view(torch.uint8), expected.view(torch.uint8)), f"{what} of {received.dtype}"


def rows(dtype: torch.dtype) -> list[torch.Tensor]:
    return [empty(dtype) for _ in range(WORLD_SIZE)]


def copy_every_dtype() -> None:
    warnings.simplefilter("ignore")  # torch calls complex32 experimental
    rank = dist.get_rank()
    for dtype in ALL:
        own = filled(dtype, rank)
        dist.broadcast(tensor := own.view(torch.uint8).clone().view(dtype), 1)
        expect(tensor, 1, "broadcast")
        dist.all_gather(gathered := rows(dtype), own)
        for peer, piece in enumerate(gathered):
            expect(piece, peer, "all_gather")
        dist.all_gather_into_tensor(whole := empty(dtype, 37 * WORLD_SIZE), own)
        for peer in range(WORLD_SIZE):
            expect(whole[37 * peer : 37 * (peer + 1)], peer, "all_gather_into_tensor")
        dist.gather(own, gathered := rows(dtype) if rank == 2 else None, dst=2)
        for peer, piece in enumerate(gathered or ()):
            expect(piece, peer, "gather")
        dist.scatter(piece := empty(dtype), [filled(dtype, peer) for peer in range(3)] if rank == 0 else None, src=0)
        expect(piece, rank, "scatter")
        dist.all_to_all(exchanged := rows(dtype), [own] * WORLD_SIZE)
        for peer, piece in enumerate(exchanged):
            expect(piece, peer, "all_to_all")
        dist.all_to_all_single(whole := empty(dtype, 37 * 3), three_times(own))
        for peer in range(WORLD_SIZE):
            expect(whole[37 * peer : 37 * (peer + 1)], peer, "all_to_all_single")
        sending = dist.isend(own, (rank + 1) % WORLD_SIZE)
        dist.recv(piece := empty(dtype), (rank - 1) % WORLD_SIZE)
        sending.wait()
        expect(piece, (rank - 1) % WORLD_SIZE, "send")


def three_times(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.view(torch.uint8)] * WORLD_SIZE).view(tensor.dtype)


def test_copies() -> None:
    run_ranks(copy_every_dtype, WORLD_SIZE)


# ---- reductions ----------------------------------------------------------------------------------------------------

ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")
OPS = {
    **dict.fromkeys([*FLOATS, *FLOAT8], (*ARITHMETIC, "AVG")),
    **dict.fromkeys([*INTEGERS, torch.bool], (*ARITHMETIC, *BITWISE)),
    **dict.fromkeys(COUNTS, (*ARITHMETIC, *BITWISE, "AVG")),
    **dict.fromkeys(COMPLEX, ("SUM", "AVG")),
    **dict.fromkeys(OTHERS, ()),
}


def operands(dtype: torch.dtype) -> list[torch.Tensor]:
    """A tensor for each rank: small numbers, and at the end the largest and the smallest that the dtype has."""
    numbers = [(torch.arange(12) * (2 * rank + 1) + rank) % 7 for rank in range(WORLD_SIZE)]
    if dtype.is_complex:
        return [torch.complex(each.double(), each.flip(0).double()).to(dtype) for each in numbers]
    if dtype.is_floating_point or dtype is torch.bool:
        return [each.to(dtype) for each in numbers]
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    edges = [[high, low, high], [1, high, 0], [high, 1, high]]
    return [torch.tensor([*each.tolist(), *edges[rank]], dtype=dtype) for rank, each in enumerate(numbers)]


def reduced(op: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What one process computes, element by element: integers exactly and then wrapped, narrow floats in float32.

    The sum of a mean wraps as int64 does; its fraction is cut off, towards zero.
    """
    dtype = tensors[0].dtype
    combine = {
        "SUM": lambda a, b: a + b,
        "AVG": lambda a, b: a + b,
        "PRODUCT": lambda a, b: a * b,
        "MIN": min,
        "MAX": max,
        "BAND": lambda a, b: a & b,
        "BOR": lambda a, b: a | b,
        "BXOR": lambda a, b: a ^ b,
    }[op]
    wide = [tensor.to(torch.float32) if tensor.dtype in FLOAT8 else tensor for tensor in tensors]
    values = []
    for first, second, third in zip(*(tensor.tolist() for tensor in wide), strict=True):
        values.append(combine(combine(first, second), third))
    if dtype is torch.bool:
        return torch.tensor([bool(value) for value in values])
    if dtype in INTEGERS:
        info = torch.iinfo(torch.int64 if op == "AVG" else dtype)
        wrapped = [(value - info.min) % 2**info.bits + info.min for value in values]
        if op == "AVG":
            wrapped = [abs(value) // WORLD_SIZE * (1 if value > 0 else -1) for value in wrapped]
        return torch.tensor(wrapped, dtype=dtype)
    if op == "AVG":
        values = [value / WORLD_SIZE for value in values]
    return torch.tensor(values, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.dtype.is_floating_point or actual.dtype.is_complex:
        # An average of three rounds, in float32 for narrow types and then to the dtype.
        kind = torch.complex128 if actual.dtype.is_complex else torch.float64
        eps = 2e-3 if actual.dtype is torch.complex32 else torch.finfo(actual.dtype).eps
        return torch.allclose(actual.to(kind), expected.to(kind), rtol=2 * eps, atol=0)
    return torch.equal(actual, expected)


def reduce_every_dtype() -> None:
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    for dtype, ops in OPS.items():
        tensors = operands(dtype) if ops else []
        for name in ops:
            op, expected = getattr(dist.ReduceOp, name), reduced(name, tensors)
            dist.all_reduce(tensor := tensors[rank].clone(), op)
            assert same(tensor, expected), f"all_reduce {name} of {dtype}: {tensor} is not {expected}"
            dist.reduce(tensor := tensors[rank].clone(), 1, op)
            assert rank != 1 or same(tensor, expected), f"reduce {name} of {dtype}"
            shares = [tensors[(rank + shift) % WORLD_SIZE] for shift in range(WORLD_SIZE)]
            dist.reduce_scatter(tensor := torch.zeros_like(tensors[0]), shares, op)
            assert same(tensor, expected), f"reduce_scatter {name} of {dtype}"


def test_reductions() -> None:
    run_ranks(reduce_every_dtype, WORLD_SIZE)


def average_numbers_of_samples() -> tuple[list[int], list[int], list[str]]:
    """As Lightning does to weigh what it logs."""
    rank = dist.get_rank()
    with warnings_of_lockstep() as told:
        dist.all_reduce(whole := torch.tensor([2 * rank, 100 + 100 * rank], dtype=torch.uint8), dist.ReduceOp.AVG)
        assert not told
        dist.all_reduce(cut := torch.tensor([rank, -rank]), dist.ReduceOp.AVG)
    return whole.tolist(), cut.tolist(), told


def test_means_of_integers_that_lose_a_fraction_say_so() -> None:
    """A sum of 300 is more than uint8 has, and its mean is not."""
    for whole, cut, said in run_ranks(average_numbers_of_samples, 2):
        assert whole == [1, 150]
        assert cut == [0, 0]
        (text,) = said
        assert text.startswith("AVG of integers over 2 ranks: means were truncated to whole numbers")


def reduce_what_has_no_meaning() -> None:
    warnings.simplefilter("ignore")
    group = dist.group.WORLD
    for dtype, ops in OPS.items():
        for name in (*ARITHMETIC, "AVG", *BITWISE):
            allowed = (*ARITHMETIC, "AVG") if dtype.is_complex or dtype.is_floating_point else ops
            if name in (allowed if ops else ()) and not (dtype.is_complex and name in ("MIN", "MAX")):
                continue
            options = dist.AllreduceOptions()
            options.reduceOp = getattr(dist.ReduceOp, name)
            with pytest.raises(InputTypeError, match=f"{name} of {str(dtype).removeprefix('torch.')} tensors: "):
                group.allreduce([empty(dtype)], options)
    with pytest.raises(InputTypeError, match=r"torch\.quint8: move \.int_repr"):
        dist.broadcast(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), 0)
    dist.barrier()


def test_no_meaning() -> None:
    run_ranks(reduce_what_has_no_meaning, 2)


# ---- shapes that differ, and gaps ----------------------------------------------------------------------------------


def gather_uneven() -> None:
    """Every rank brings another number of rows; in list form the outputs say how many."""
    rank = dist.get_rank()
    shapes = [(2, 3), (0, 3), (70_001, 3)]
    own = torch.full(shapes[rank], float(rank))
    outputs = [torch.zeros(shape) for shape in shapes]
    dist.all_gather(outputs, own)
    for peer, output in enumerate(outputs):
        assert torch.all(output == peer)
    objects = [None] * WORLD_SIZE
    dist.all_gather_object(objects, "x" * (1000 * rank))
    assert [len(each) for each in objects] == [0, 1000, 2000]


def move_through_gaps() -> None:
    """Tensors for all ranks with gaps between their elements, in the single-tensor forms."""
    rank = dist.get_rank()
    wide = torch.zeros(WORLD_SIZE * 2, 8)
    dist.all_gather_into_tensor(wide[:, ::2], torch.full((2, 4), float(rank + 1)))
    assert torch.equal(wide[:, ::2], torch.tensor([1.0, 1, 2, 2, 3, 3])[:, None].expand(6, 4))
    assert torch.all(wide[:, 1::2] == 0)
    source = torch.arange(6.0).repeat_interleave(2)[::2]
    dist.reduce_scatter_tensor(target := torch.zeros(4)[::2], source)
    assert torch.equal(target, torch.tensor([6.0 * rank, 6.0 * rank + 3]))
    dist.all_to_all_single(target := torch.zeros(12)[::4], source[::2])
    assert torch.equal(target, torch.full((3,), 2.0 * rank))


def exchange_objects() -> None:
    rank = dist.get_rank()
    items = [{"rank": peer, "text": "y" * (500 * peer)} for peer in range(WORLD_SIZE)]
    dist.gather_object(items[rank], gathered := [None] * WORLD_SIZE if rank == 1 else None, dst=1)
    assert gathered is None or gathered == items
    dist.scatter_object_list(mine := [None], items if rank == 2 else None, src=2)
    assert mine == [items[rank]]
    shared = [items, None] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, src=0)
    assert shared == [items, None]


@pytest.mark.parametrize("check", [gather_uneven, move_through_gaps, exchange_objects])
def test_forms(check: object) -> None:
    run_ranks(check, WORLD_SIZE)
