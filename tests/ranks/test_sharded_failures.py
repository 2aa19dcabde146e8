"""What goes wrong with a sharded optimizer has a name: the rank, the option, the parameter."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_checks import error_of
from lockstep import DistributedDataParallel, ZeroRedundancyOptimizer
from lockstep.errors import CollectiveMismatch, InputError, InputTypeError, ModelError, ModelMismatch, RankLost
from lockstep.testing import WorkerDied, run_ranks
from test_sharded import backward, net


def made(cls: Any = torch.optim.SGD, **options: Any) -> tuple[Any, Any]:
    model = DistributedDataParallel(net())
    return model, ZeroRedundancyOptimizer(model.parameters(), cls, **(options or {"lr": 0.1}))


def other_class() -> None:
    made(torch.optim.SGD if dist.get_rank() else torch.optim.Adam, lr=0.1)


def other_options() -> None:
    made(torch.optim.SGD, lr=0.1 + dist.get_rank())


def other_groups() -> None:
    model = DistributedDataParallel(net())
    ZeroRedundancyOptimizer(list(model.parameters())[dist.get_rank() :], torch.optim.SGD, lr=0.1)


def other_values() -> None:
    model = DistributedDataParallel(net())
    torch.nn.init.constant_(model.module[4].bias, dist.get_rank())
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (other_class, "optimizer_class=torch.optim.adam.Adam"),
        (other_options, "options of group 0=lr=0.1;"),
        (other_groups, "parameter 0=[4, 1, 3, 3]"),
        (other_values, "parameter 5=[7] torch.float64"),
    ],
)
def test_ranks_make_the_same_optimizer(make: Callable[[], None], words: str, backend: str) -> None:
    for error in run_ranks(make, 2, expect_errors=True, backend=backend):
        assert isinstance(error, ModelMismatch)
        assert f"First difference: rank 0 has {words}" in str(error)


def other_rate() -> None:
    model, optimizer = made()
    backward(model, 0)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
    optimizer.step()


def other_gradients() -> None:
    model, optimizer = made()
    backward(model, 0)
    if dist.get_rank():
        model.module[4].bias.grad = None
    optimizer.step()


def leave_a_step_out() -> None:
    model, optimizer = made()
    for seed in range(2):
        optimizer.zero_grad()
        backward(model, seed)
        if seed or dist.get_rank():
            optimizer.step()


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (other_rate, "lr=0.2"),
        (other_gradients, "step(gradients of [0, 1, 2, 3, 4] parameters; lr=0.1"),
        (leave_a_step_out, "DistributedDataParallel's gradient averaging"),
    ],
)
def test_ranks_take_the_same_step(run: Callable[[], None], words: str) -> None:
    for error in run_ranks(run, 2, expect_errors=True):
        assert isinstance(error, CollectiveMismatch)
        assert words in str(error)
        assert "ZeroRedundancyOptimizer(SGD).step(gradients of" in str(error)


class Deadly(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Wrong(Deadly):
    def step(self, closure: Any = None) -> None:
        if dist.get_rank() == 1:
            raise ValueError("a step that went wrong")


def step_once(kind: type[Deadly]) -> None:
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind)
    backward(model, 0)
    optimizer.step()


def test_a_rank_that_dies_within_the_step() -> None:
    first, second = run_ranks(step_once, 2, Deadly, expect_errors=True)
    assert isinstance(second, WorkerDied)
    assert isinstance(first, RankLost)
    assert "ZeroRedundancyOptimizer(Deadly).step" in str(first)


def test_a_rank_whose_step_raises() -> None:
    first, second = run_ranks(step_once, 2, Wrong, expect_errors=True)
    assert isinstance(second, ValueError)
    assert isinstance(first, RankLost)
    assert "a step that went wrong" in str(first)


def use_wrongly() -> list[tuple[type, str]]:
    """On every rank alike."""
    model, optimizer = made()
    errors = [
        error_of(ZeroRedundancyOptimizer, model.parameters(), torch.optim.LBFGS),
        error_of(ZeroRedundancyOptimizer, model.parameters(), torch.optim.SparseAdam),
        error_of(ZeroRedundancyOptimizer, model.parameters(), nn.Linear),
        error_of(ZeroRedundancyOptimizer, model.parameters(), torch.optim.SGD(model.parameters(), lr=1)),
        error_of(model.register_comm_hook, None, lambda state, bucket: None),
    ]
    with model.no_sync():
        backward(model, 0)
    errors.append(error_of(optimizer.step))
    sparse = DistributedDataParallel(nn.EmbeddingBag(10, 3, sparse=True))
    errors.append(error_of(ZeroRedundancyOptimizer, sparse.parameters(), torch.optim.SGD))
    twice = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    twice[1].weight.data = twice[0].weight.data
    wrapped = DistributedDataParallel(twice)
    errors.append(error_of(ZeroRedundancyOptimizer, wrapped.parameters(), torch.optim.SGD))
    return [(type(error), str(error)) for error in errors]


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    expected = [
        (InputError, "ZeroRedundancyOptimizer cannot shard LBFGS"),
        (InputError, "ZeroRedundancyOptimizer cannot shard SparseAdam"),
        (InputTypeError, "optimizer_class must be a class, such as torch.optim.AdamW, got Linear"),
        (InputTypeError, "optimizer_class must be a class, such as torch.optim.AdamW, got SGD"),
        (ModelError, "a communication hook would see gradients that ZeroRedundancyOptimizer has sharded"),
        (ModelError, "a parameter of ZeroRedundancyOptimizer has a gradient that DistributedDataParallel has not"),
        (InputError, "weight has sparse gradients, which cannot be sharded"),
        (InputError, "parameters number 0 and number 2 are two views of one memory"),
    ]
    for errors in run_ranks(use_wrongly, 2):
        for (kind, text), (expected_kind, words) in zip(errors, expected, strict=True):
            assert kind is expected_kind, text
            assert text.startswith(words)
