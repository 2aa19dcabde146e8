"""Samplers that give each rank its own part of the data, without an attribute that says so."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import SubsetRandomSampler

from lockstep.data import DataLoader, own_parts
from lockstep.errors import DataError
from lockstep.testing import run_ranks

_NUM_SAMPLES = 12


def strided(part: int, parts: int) -> Any:
    return np.arange(part, _NUM_SAMPLES, parts)  # Swin-Transformer's


def contiguous(part: int, parts: int) -> Any:
    return np.array_split(np.arange(_NUM_SAMPLES), parts)[part]


def shuffled(part: int, parts: int) -> Any:
    order = torch.randperm(_NUM_SAMPLES + 1, generator=torch.Generator().manual_seed(0))  # parts of several sizes
    return order[part::parts].tolist()


def evaluated(choose: Callable[[int, int], Any], num_samples: int) -> list[int]:
    own_parts._count = itertools.count()  # the process may have run other tests than its neighbours
    sampler = SubsetRandomSampler(choose(dist.get_rank(), dist.get_world_size()))
    loader = DataLoader(range(num_samples), 4, sampler=sampler, evaluation=True)
    seen = [index for batch in loader for index in batch.tolist()]
    dist.barrier()
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("choose", [strided, contiguous, shuffled])
@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
def test_a_sampler_of_a_ranks_own_part_is_refused(choose: Any, world_size: int, backend: str) -> None:
    num_samples = _NUM_SAMPLES + (choose is shuffled)
    outcomes = run_ranks(evaluated, world_size, choose, num_samples, backend=backend, expect_errors=True)
    texts = [str(each) for each in outcomes if isinstance(each, DataError)]
    assert texts
    assert all("SubsetRandomSampler gives this rank other indices than rank" in text for text in texts)


def folds() -> list[Any]:
    """Every fold of as many as there are ranks, by one loader each, and the data as a whole."""
    own_parts._count = itertools.count()
    parts, seen = dist.get_world_size(), []
    choices = [choose(part, parts) for choose in (strided, contiguous) for part in range(parts)]
    for chosen in (*choices, np.arange(_NUM_SAMPLES)):
        loader = DataLoader(range(_NUM_SAMPLES), 4, sampler=SubsetRandomSampler(chosen), evaluation=True)
        if dist.get_rank() == 0:
            next(iter(loader))  # a rank that looks at a batch is ahead, but with no other data
            loader.set_epoch(0)
        seen += [[index for _ in range(2) for batch in loader for index in batch.tolist()]]
    dist.barrier()
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_subset_that_all_ranks_mean_is_taken(world_size: int) -> None:
    per_rank = run_ranks(folds, world_size)
    chosen = [choose(part, world_size) for choose in (strided, contiguous) for part in range(world_size)]
    for seen, expected in zip(zip(*per_rank, strict=True), (*chosen, np.arange(_NUM_SAMPLES)), strict=True):
        assert sorted(itertools.chain(*seen)) == sorted([*expected, *expected])


def one_rank_by_itself() -> int:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(range(_NUM_SAMPLES), 2, sampler=strided(rank, world_size), rank=0, world_size=1)
    return sum(map(len, loader))


def test_a_loader_of_one_rank_may_have_its_own_part() -> None:
    assert run_ranks(one_rank_by_itself, 2) == [6, 6]
