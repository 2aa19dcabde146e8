"""The tree over the rows of a matrix has the bits of the tree over parts, in any dtype, time after time."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ReduceOp

from lockstep.shm.kernels import find_kernel
from lockstep.shm.row_tree import RowTree

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
