"""An evaluation whose numbers are one rank's: a line, where nothing was communicated after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from ddp_checks import warnings_of_lockstep
from lockstep.testing import run_ranks

WARNING = "and nothing was communicated"
NUM_SAMPLES = 23


def evaluate(loader: Any) -> tuple[float, int]:
    right = n = 0
    for (x,) in loader:
        right, n = right + int((x > 0).sum()), n + len(x)
    return float(right), n


def evaluating(after: Callable[[float, int], object], epochs: int = 1, group: str = "lockstep", **options: Any) -> str:
    data = torch.utils.data.TensorDataset(torch.randn(NUM_SAMPLES, generator=torch.Generator().manual_seed(0)))
    with warnings_of_lockstep() as messages, lockstep.init(backend=group):
        loader = lockstep.DataLoader(data, **({"batch_size": 5, "evaluation": True} | options))
        dist.barrier()
        for _ in range(epochs):
            after(*evaluate(loader))
    return "\n".join(messages)


def by_hand(right: float, n: int) -> None:
    """What a script does that prints the accuracy of rank 0."""


def by_mean(right: float, n: int) -> None:
    assert torch.isfinite(lockstep.mean(torch.tensor(right), n))


def by_all_reduce(right: float, n: int) -> None:
    counts = torch.tensor([right, float(n)])
    dist.all_reduce(counts)
    assert counts[1] == NUM_SAMPLES


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_counts_of_one_rank_are_told_of(epochs: int, backend: str) -> None:
    first, *others = run_ranks(evaluating, 2, by_hand, epochs, backend, init=False)
    assert first.count(WARNING) == 1
    assert f"rank 0 evaluated 14 of {NUM_SAMPLES} samples" in first  # 3 + 3 + 3 + 3 + 2
    assert "lockstep.mean" in first
    assert not any(others)


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
@pytest.mark.parametrize("after", [by_mean, by_all_reduce])
def test_counts_that_are_added_up_are_not(after: Callable[[float, int], object], backend: str) -> None:
    assert run_ranks(evaluating, 2, after, 2, backend, init=False) == ["", ""]


def gathering_each_batch(group: str) -> str:
    data = torch.utils.data.TensorDataset(torch.arange(24.0))
    with warnings_of_lockstep() as messages, lockstep.init(backend=group):
        for _ in range(2):
            seen = sum(len(lockstep.all_gather(x)) for (x,) in lockstep.DataLoader(data, 6, evaluation=True))
            assert seen == len(data)
    return "\n".join(messages)


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
def test_nor_are_those_of_batches_that_were_gathered(backend: str) -> None:
    assert run_ranks(gathering_each_batch, 2, backend, init=False) == ["", ""]


def with_a_loader_that_is_gone() -> str:
    accuracy = lockstep.metrics.Accuracy()
    data = torch.utils.data.TensorDataset(torch.randn(NUM_SAMPLES, 3), torch.zeros(NUM_SAMPLES, dtype=torch.long))
    with warnings_of_lockstep() as messages, lockstep.init():
        for x, y in lockstep.DataLoader(data, 5, evaluation=True):
            accuracy.update(x, y)
        assert accuracy.compute() <= 1  # of this rank
    return "\n".join(messages)


def test_so_are_those_by_a_loader_in_the_head_of_the_loop() -> None:
    first, *others = run_ranks(with_a_loader_that_is_gone, 2, init=False)
    assert first.count(WARNING) == 1
    assert not any(others)


def without_gradients() -> str:
    with torch.no_grad():
        return evaluating(by_hand, evaluation=False)


def test_a_loader_that_is_walked_without_gradients_evaluates() -> None:
    first, *others = run_ranks(without_gradients, 2, init=False)
    assert first.count(WARNING) == 1
    assert not any(others)


def test_training_and_single_processes_hear_nothing() -> None:
    assert run_ranks(evaluating, 2, by_hand, 1, "lockstep", evaluation=False, init=False) == ["", ""]
    assert run_ranks(evaluating, 1, by_hand, 1, "lockstep", init=False) == [""]
