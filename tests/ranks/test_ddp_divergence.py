"""Ranks whose parameters come apart although their gradients are averaged: by a learning rate, a step, noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddp_checks import backends, data, mlp, num_collectives
from lockstep import DistributedDataParallel
from lockstep.errors import ModelMismatch
from lockstep.testing import run_ranks

STEPS = 20

Loop = Callable[[DistributedDataParallel, torch.optim.Optimizer, int], None]


def train(step: Callable[[DistributedDataParallel, torch.optim.Optimizer, int, Tensor], None], hooked: bool) -> str:
    """The error of that training, with the number of steps until it came."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(mlp().double())
    if hooked:
        model.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = (model(data(3, 4, seed=number)) + 1).square().mean()
        try:
            loss.backward()
        except ModelMismatch as error:
            return f"after {number}: {error}"
        step(model, optimizer, number, loss.detach())
    return ""


def plateau(schedulers: list[ReduceLROnPlateau]) -> Callable[..., None]:
    def step(_: object, optimizer: torch.optim.Optimizer, number: int, __: Tensor) -> None:
        if not schedulers:
            schedulers.append(ReduceLROnPlateau(optimizer, patience=0))
        optimizer.step()
        schedulers[0].step(1.0 if dist.get_rank() == 1 else 1.0 / (number + 1))

    return step


def own_rate(_: object, optimizer: torch.optim.Optimizer, number: int, __: Tensor) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (1 + dist.get_rank())
    optimizer.step()


def skip_a_step(_: object, optimizer: torch.optim.Optimizer, number: int, __: Tensor) -> None:
    if number != 1 or dist.get_rank() == 0:
        optimizer.step()


def add_noise(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, __: Tensor) -> None:
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)


def run_plateau(hooked: bool = False) -> str:
    return train(plateau([]), hooked)


CAUSES = [own_rate, skip_a_step, add_noise]


@backends
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
def test_what_comes_apart_is_an_error_within_steps(cause: Callable[..., None], world_size: int, backend: str) -> None:
    errors = run_ranks(partial(train, cause, False), world_size, backend=backend)
    assert len(set(errors)) == 1, "on every rank alike"
    after = int(errors[0].split(":")[0].removeprefix("after "))
    # In shared memory one value travels with each averaging; gloo compares in the fourth.
    assert after <= (2 if backend == "lockstep" else 3), errors[0]
    assert " ranks hold different values of " in errors[0]
    assert "on rank 1, by up to" in errors[0]
    assert "lockstep.mean(loss * len(y), len(y))" in errors[0]


@backends
def test_a_scheduler_that_goes_by_the_loss_of_its_rank(backend: str) -> None:
    assert all(
        "have received the same gradients since" in error for error in run_ranks(run_plateau, 2, backend=backend)
    )


# ---- what is right, or different on purpose ------------------------------------------------------------------------


def all_alike(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, __: Tensor) -> None:
    optimizer.step()
    if number == 2:
        model.requires_grad_(True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-1, 1)


def last_bits(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, __: Tensor) -> None:
    """As on another kind of processor."""
    optimizer.step()
    if dist.get_rank() == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 2e-16)


def local_sgd(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, number: int, __: Tensor) -> None:
    optimizer.step()
    with model.no_sync():
        optimizer.zero_grad()
        model(data(3, 4, seed=100 + number)).square().mean().backward()
        optimizer.step()


def sharpness_aware(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, number: int, __: Tensor) -> None:
    """Each rank goes up by its own gradient, for the averaged one there."""
    with model.no_sync():
        optimizer.zero_grad()
        model(data(3, 4, seed=100 + number)).square().mean().backward()
    moves = [0.05 * parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for sign in (1, -1):
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move, alpha=sign)
        if sign == 1:
            optimizer.zero_grad()
            model(data(3, 4, seed=100 + number)).square().mean().backward()
    optimizer.step()


@backends
@pytest.mark.parametrize("loop", [all_alike, last_bits, local_sgd, sharpness_aware], ids=lambda loop: loop.__name__)
def test_what_is_alike_or_different_on_purpose_goes_on(loop: Callable[..., None], backend: str) -> None:
    assert run_ranks(partial(train, loop, False), 2, backend=backend) == ["", ""]


def test_with_a_communication_hook_nothing_is_known() -> None:
    assert run_ranks(partial(train, own_rate, True), 2) == ["", ""]


def join_unevenly() -> list[float]:
    model = DistributedDataParallel(mlp().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Join([model]):
        for number in range(STEPS * (1 + dist.get_rank())):
            optimizer.zero_grad()
            model(data(3, 4, seed=number)).square().mean().backward()
            optimizer.step()
    return [float(parameter.detach().sum()) for parameter in model.parameters()]


@backends
def test_ranks_that_have_joined_stay_behind(backend: str) -> None:
    first, second = run_ranks(join_unevenly, 2, backend=backend)
    assert first == second


# ---- what it costs -------------------------------------------------------------------------------------------------


def count_collectives(accumulates: bool) -> list[int]:
    model = DistributedDataParallel(mlp())
    counts = []
    for _ in range(17):
        if accumulates:
            with model.no_sync():
                model(torch.ones(3, 4)).mean().backward()
        begin = num_collectives()
        model(torch.ones(3, 4)).mean().backward()
        counts.append(num_collectives() - begin)
    return counts


@pytest.mark.parametrize("accumulates", [False, True])
def test_parameters_that_are_alike_cost_one_collective_in_all(accumulates: bool) -> None:
    (counts, _) = run_ranks(count_collectives, 2, accumulates)
    assert counts == [2] + [1] * 16
