"""Small parts of many ranks are reduced by other calls of torch than few or large ones, to the same bits."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ReduceOp

from lockstep.shm import kernels
from lockstep.shm.kernels import divide, find_kernel

COUNTS = (15, 16, 17, 23, 31, 32, 33, 64)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int8, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn],
    ids=str,
)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX])
@pytest.mark.parametrize("count", COUNTS)
def test_same_bits(monkeypatch: pytest.MonkeyPatch, count: int, op: ReduceOp, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    memory = torch.randn(count, 50, generator=generator).mul_(3).abs_().to(dtype)
    parts = [row[:37] for row in memory]
    before = memory.clone()
    kernel = find_kernel(op, dtype)
    together, one_by_one = torch.empty(37, dtype=dtype), torch.empty(37, dtype=dtype)
    kernel.reduce(parts, together)
    monkeypatch.setattr(kernels, "_MANY_PARTS", 1000)
    kernel.reduce(parts, one_by_one)
    assert torch.equal(together.view(torch.uint8), one_by_one.view(torch.uint8))
    assert torch.equal(memory, before), "the parts are those of other ranks"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_of_many(dtype: torch.dtype) -> None:
    out = torch.empty(3, dtype=dtype)
    find_kernel(ReduceOp.AVG, dtype).reduce([torch.full((3,), float(i), dtype=dtype) for i in range(33)], out)
    assert out.tolist() == [16.0] * 3


def test_result_may_lie_in_a_part() -> None:
    parts = [torch.full((5,), float(i)) for i in range(20)]
    find_kernel(ReduceOp.SUM, torch.float32).reduce(parts, parts[3])
    assert parts[3].tolist() == [190.0] * 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 64])
def test_a_mean_of_every_number_of_16_bits_is_its_quotient(dtype: torch.dtype, count: int) -> None:
    total = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    mean = total.clone()
    divide(mean, count)
    torch.testing.assert_close(mean, total / count, rtol=0, atol=0, equal_nan=True)
