"""The tree over the rows of a matrix has the bits of the tree over parts, in any dtype, time after time."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ReduceOp

from lockstep.shm.kernels import find_kernel
from lockstep.shm.row_tree import RowShare, RowTree

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint16, torch.uint64)
NUMEL = 37


def matrix_of(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows that lie apart, as slots do."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 50, generator=generator).mul_(3).abs_().to(dtype)[:, :NUMEL]


OPERATIONS = [(op, dtype) for dtype in DTYPES for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX)]
MEANS = [(ReduceOp.AVG, dtype) for dtype in (*DTYPES, torch.int64) if dtype.is_floating_point or dtype.is_signed]


@pytest.mark.parametrize(("op", "dtype"), [*OPERATIONS, *MEANS])
@pytest.mark.parametrize("count", [*range(3, 18), 31, 32, 33, 64])
def test_same_bits(count: int, op: ReduceOp, dtype: torch.dtype) -> None:
    kernel = find_kernel(op, dtype)
    rows = matrix_of(count, dtype)
    tree = RowTree(rows, torch.full((count, NUMEL), 77, dtype=kernel.accumulate or dtype))
    for seed in (1, 2):
        rows.copy_(matrix_of(count, dtype, seed))
        before = rows.clone()
        by_tree, by_parts = torch.empty(NUMEL, dtype=dtype), torch.empty(NUMEL, dtype=dtype)
        tree.reduce(kernel, by_tree)
        kernel.reduce(list(rows), by_parts)
        assert torch.equal(by_tree.view(torch.uint8), by_parts.view(torch.uint8))
        assert torch.equal(rows, before), "the rows are those of other ranks"


def test_other_operations_in_the_same_tree() -> None:
    rows = matrix_of(5, torch.float32)
    tree = RowTree(rows, torch.empty(5, NUMEL))
    for op, expected in ((ReduceOp.MAX, rows.amax(0)), (ReduceOp.MIN, rows.amin(0)), (ReduceOp.MAX, rows.amax(0))):
        out = torch.empty(NUMEL)
        tree.reduce(find_kernel(op, torch.float32), out)
        assert torch.equal(out, expected)


def test_no_elements() -> None:
    rows = torch.empty(4, 0)
    out = torch.empty(0)
    RowTree(rows, torch.empty(4, 0)).reduce(find_kernel(ReduceOp.SUM, torch.float32), out)
    assert out.shape == (0,)


@pytest.mark.parametrize("is_handed_back", [True, False])
@pytest.mark.parametrize(("op", "dtype"), [(ReduceOp.SUM, torch.float32), *MEANS])
@pytest.mark.parametrize("numel", [1, 37, 200, 1024, 1500])
@pytest.mark.parametrize("count", [3, 4, 5, 8, 17])
def test_shares_make_the_whole(count: int, numel: int, op: ReduceOp, dtype: torch.dtype, is_handed_back: bool) -> None:
    """Of all ranks, in pieces: more elements than a piece has, fewer than a share needs, and some that are left."""
    kernel = find_kernel(op, dtype)
    memory = torch.full((count, numel + 9), 7, dtype=dtype)
    rows = memory[:, 5 : numel + 5]
    shares = [
        RowShare(rows, rank, torch.empty(50 * count, dtype=kernel.accumulate or dtype), is_handed_back)
        for rank in range(count)
    ]
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        parts = torch.randn(count, numel, generator=generator).mul_(3).abs_().to(dtype)
        for share, part in zip(shares, parts, strict=True):
            share.own.copy_(part)
        for share in shares:
            share.reduce(kernel)
        expected = torch.empty(numel, dtype=dtype)
        kernel.reduce(list(parts), expected)
        for share in shares:
            out = torch.empty(numel, dtype=dtype)
            share.copy_to(out)
            assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(memory[:, :5], torch.full((count, 5), 7, dtype=dtype))
    assert torch.equal(memory[:, numel + 5 :], torch.full((count, 4), 7, dtype=dtype))
