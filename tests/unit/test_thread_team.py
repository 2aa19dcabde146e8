"""A backend that is nothing but the contract (`lockstep.comm.contract`): ranks that are threads of this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import CollectiveMismatch, InputError, RankLost
from lockstep.testing.conformance import CASES
from lockstep.testing.conformance.case import Case, Context
from thread_team import run_threads


def said_by(case: Case, context: Context) -> str:
    """What is wrong; empty for nothing."""
    try:
        case.check(context, **case.arguments)
    except Exception as error:
        return f"{case.name}: {error!r}"
    return ""


@pytest.mark.parametrize("world_size", [2, 3])
def test_threads_conform(world_size: int) -> None:
    cases = [case for case in CASES if case.min_world_size <= world_size]

    def run(rank: int) -> str:
        said = (said_by(case, Context(rank, world_size)) for case in cases)
        return next(filter(None, said), "all passed")

    assert run_threads(run, world_size) == ["all passed"] * world_size


def test_ranks_that_disagree() -> None:
    def run(rank: int) -> None:
        tensor = torch.full((3 + rank,), 7.0)
        with pytest.raises(CollectiveMismatch) as caught:
            dist.all_reduce(tensor)
        assert "all_reduce(float32[3], SUM)" in str(caught.value)
        assert "all_reduce(float32[4], SUM)" in str(caught.value)
        assert tensor.eq(7.0).all(), "a mismatch is found before a byte is written"
        dist.barrier()  # the group continues

    assert run_threads(run, 2) == [None, None]


def test_a_rank_that_leaves() -> None:
    def run(rank: int) -> None:
        dist.barrier()
        if rank == 1:
            dist.all_reduce(torch.ones(1))

    left, waited = run_threads(run, 2)
    assert left is None
    assert isinstance(waited, RankLost)
    assert "rank 0" in str(waited)
    assert waited.culprits == (0,)


def test_what_a_backend_cannot_do_is_refused_before_anybody_waits() -> None:
    """By its properties, not by its class."""

    def run(rank: int) -> None:
        engine: Any = dist.group.WORLD.engine  # type: ignore[union-attr]
        assert not engine.team.has_symmetric_memory
        with pytest.raises(InputError, match="the default group has no symmetric memory"):
            engine.allocate(1)
        with pytest.raises(InputError, match="the default group has no memory that all its ranks share"):
            engine.run_steps("text")
        dist.barrier()

    assert run_threads(run, 2) == [None, None]


def test_data_parallel_training() -> None:
    """The engine of DDP takes any group whose ranks have a `torch.distributed` of their own."""

    def run(rank: int) -> torch.Tensor:
        model = lockstep.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        with torch.no_grad():
            model.module.weight.fill_(0.0)
        inputs = torch.eye(3)[rank : rank + 1]
        lockstep.mean(model(inputs).sum(), 1).backward()
        return model.module.weight.grad.clone()

    first, second = run_threads(run, 2)
    assert first.tolist() == [[0.5, 0.5, 0.0]]
    assert second.tolist() == first.tolist()
