"""Parameters that are frozen and unfrozen after a model was wrapped are averaged; new ones are an error everywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from ddp_checks import backends, error_of
from lockstep.errors import ModelError
from lockstep.testing import run_ranks


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def unfreeze(model: nn.Module, step: int, optimizer: torch.optim.Optimizer) -> None:
    """A frozen backbone; one layer more every two steps, and its parameters to the optimizer."""
    if step in (2, 4):
        layer = model.module[0 if step == 4 else 2]
        layer.requires_grad_(True)
        optimizer.add_param_group({"params": list(layer.parameters())})


def freeze(model: nn.Module, step: int, optimizer: torch.optim.Optimizer) -> None:
    """Wrapped first, and frozen after that; unfrozen later."""
    model.module[0].requires_grad_(step >= 4)


def take_turns(model: nn.Module, step: int, optimizer: torch.optim.Optimizer) -> None:
    model.module[0].requires_grad_(step % 2 == 0)
    model.module[4].requires_grad_(step % 2 == 1)


Change = Callable[[nn.Module, int, torch.optim.Optimizer], None]


def train(change: Change, accumulates: bool) -> Tensor:
    """Parameters after eight steps on batches that the ranks do not divide."""
    inner = make()
    if change is unfreeze:
        inner[0].requires_grad_(False)
        inner[2].requires_grad_(False)
    model = lockstep.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    for step, (x,) in enumerate(lockstep.DataLoader(data, batch_size=5)):
        change(model, step, optimizer)
        optimizer.zero_grad()
        if accumulates:
            with model.no_sync():
                model(x * 1.0).square().mean().backward()
        model(x).exp().mean().backward()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@backends
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("change", [unfreeze, freeze, take_turns])
def test_what_is_frozen_and_unfrozen_trains_as_on_one_rank(change: Change, accumulates: bool, backend: str) -> None:
    (expected,) = run_ranks(train, 1, change, accumulates)
    for found in run_ranks(train, 3, change, accumulates, backend=backend):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def train_in_float64_from(when: int) -> torch.Tensor:
    """The wrapped model, or the one in it, is converted before so many steps."""
    torch.manual_seed(0)
    model = lockstep.DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(42, 3, generator=torch.Generator().manual_seed(1)) / 3)
    for step, (x,) in enumerate(lockstep.DataLoader(data, batch_size=6)):
        if step == when:
            (model if when else model.module).double()
        optimizer.zero_grad()
        model(x.double() if step >= when else x).exp().mean().backward()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@backends
@pytest.mark.parametrize("when", [0, 2])
def test_a_model_that_is_converted_is_averaged_in_its_new_dtype(when: int, backend: str) -> None:
    (expected,) = run_ranks(train_in_float64_from, 1, when)
    for found in run_ranks(train_in_float64_from, 3, when, backend=backend):
        assert found.dtype is torch.float64
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 if when == 0 else 1e-6)
    assert when == 0 or (expected != expected.float().double()).any()


def step_by_a_new_head() -> str:
    model = lockstep.DistributedDataParallel(make())
    model.module.append(nn.Linear(2, 2).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3).double()).sum().backward()
    return str(error_of(optimizer.step))


def replace_the_head() -> str:
    model = lockstep.DistributedDataParallel(make())
    model.module[4] = nn.Linear(8, 2).double()
    return str(error_of(model(torch.ones(2, 3).double()).sum().backward))


@pytest.mark.parametrize("world_size", [1, 2])
def test_new_parameters_are_an_error_on_any_number_of_ranks(world_size: int) -> None:
    for message in run_ranks(step_by_a_new_head, world_size):
        assert "2 parameter(s) of the model require a gradient that is not averaged: 5.weight, 5.bias" in message
        assert "then wrap the model" in message
    for message in run_ranks(replace_the_head, world_size):
        assert "got no gradient" in message
        assert "If they were replaced, wrap the model again" in message


def test_a_model_with_nothing_left_to_train_is_an_error() -> None:
    with lockstep.init(device="cpu"), pytest.raises(ModelError):
        lockstep.DistributedDataParallel(make().requires_grad_(False))
