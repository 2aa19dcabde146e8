"""`reduce`, in which the root adds up what it gets and what it holds: it gets what `all_reduce` gives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lockstep.testing import run_ranks

SIZES = (3, 40_000, 700_001)  # of one small slot, of a large one, and of more than one


def operands(numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    return torch.randn(numel, generator=generator).mul_(8).to(dtype)


def reduce_to_each() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    premul = dist._make_nccl_premul_sum(0.3)
    cases = [(torch.float32, op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, premul)]
    cases += [(torch.int64, dist.ReduceOp.SUM), (torch.bfloat16, dist.ReduceOp.SUM), (torch.float64, premul)]
    for dtype, op in cases:
        for numel in SIZES:
            given = operands(numel, dtype)
            dist.all_reduce(expected := given.clone(), op)
            for root in (0, world_size - 1):
                dist.reduce(tensor := given.clone(), root, op)
                wanted = expected if rank == root else given
                assert torch.equal(tensor, wanted), f"{op} of {numel} {dtype} to {root}, on rank {rank}"


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_reduce(world_size: int) -> None:
    run_ranks(reduce_to_each, world_size)
