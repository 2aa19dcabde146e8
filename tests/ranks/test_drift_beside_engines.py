"""Ranks that train apart in programs without a loader: beside an engine, or past it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from lockstep.testing import run_ranks
from test_drift import average, make_model, outcome_of

# ---- parameters beside an engine ------------------------------------------------------------------------------


def own_batches() -> list[Tensor]:
    """What each rank has drawn, as out of its replay buffer."""
    return list(torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(dist.get_rank())))


def train_with_temperature(optimizers: int, averages: bool) -> None:
    """A soft actor-critic: the temperature has an optimizer of its own, or steps with the actor."""
    model = lockstep.DistributedDataParallel(make_model())
    scale = nn.Parameter(torch.ones(1))
    if optimizers == 1:
        own = [torch.optim.SGD([*model.parameters(), scale], lr=0.01)]
    else:
        own = [torch.optim.SGD(model.parameters(), lr=0.01), torch.optim.SGD([scale], lr=0.01)]
    for inputs in own_batches():
        for optimizer in own:
            optimizer.zero_grad()
        (model(inputs) * scale).square().mean().backward()
        if averages:
            average([scale.grad])  # type: ignore[list-item]
        for optimizer in own:
            optimizer.step()


def temperature(optimizers: int, averages: bool) -> tuple[list[str], str]:
    return outcome_of(lambda: train_with_temperature(optimizers, averages))


@pytest.mark.parametrize("optimizers", [1, 2])
def test_parameters_beside_an_engine_are_an_error_without_a_loader(optimizers: int) -> None:
    (told, error), (told_on_one, error_on_one) = run_ranks(temperature, 2, optimizers, False, init=False)
    assert told_on_one == []
    assert len(told) == (optimizers == 1)
    for text in (error, error_on_one):
        assert text.startswith("ModelError: the 2 ranks have trained different models: SGD.step() at ")
        assert "stepped 1 parameter(s) that nobody averaged" in text
        assert text.endswith("write parameter.allreduce = False for each of its parameters")


def test_parameters_that_somebody_averages_without_a_loader_are_fine() -> None:
    assert run_ranks(temperature, 2, 2, True, init=False) == [([], "")] * 2


def train_unwrapped_critic() -> None:
    model, critic = lockstep.DistributedDataParallel(make_model()), make_model()
    own = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, critic)]
    for inputs in own_batches():
        for each, optimizer in zip((model, critic), own, strict=True):
            optimizer.zero_grad()
            each(inputs).square().mean().backward()
            optimizer.step()


def unwrapped_critic() -> tuple[list[str], str]:
    return outcome_of(train_unwrapped_critic)


def test_an_unwrapped_model_beside_a_wrapped_one_without_a_loader() -> None:
    for _, error in run_ranks(unwrapped_critic, 2, init=False):
        assert error.startswith("ModelError: the 2 ranks have trained different models: SGD.step() at ")


def attack_without_a_loader() -> None:
    """Inputs, by optimizers of one batch each; and latents of each rank when the model trains no more."""
    model = lockstep.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs in own_batches():
        delta = torch.zeros_like(inputs, requires_grad=True)
        attack = torch.optim.SGD([delta], lr=0.01)
        model.module(inputs + delta).square().mean().neg().backward()
        attack.step()
        optimizer.zero_grad()
        model(inputs + delta.detach()).square().mean().backward()
        optimizer.step()
    latent = torch.full((1, 4), float(dist.get_rank()), requires_grad=True)
    search = torch.optim.SGD([latent], lr=0.01)
    for _ in range(600):
        search.zero_grad()
        model.module(latent).square().sum().backward()
        search.step()


def share_a_model_that_an_engine_had() -> None:
    """The engine is gone, and each rank tries something by itself."""
    train_with_temperature(2, True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs in own_batches():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("body", [attack_without_a_loader, share_a_model_that_an_engine_had])
def test_without_a_loader_ranks_may_do_something_of_their_own(body: Callable[[], None]) -> None:
    assert run_ranks(outcome_of, 2, body, init=False) == [([], "")] * 2


# ---- an engine whose gradients never come by a backward pass --------------------------------------------------


def step_by_hand(averages: bool) -> nn.Module:
    """Natural gradients, as TRPO takes them: no `.grad`, and no optimizer."""
    policy = lockstep.DistributedDataParallel(make_model())
    parameters = list(policy.parameters())
    for inputs in own_batches():
        gradients = torch.autograd.grad(policy(inputs).square().mean(), parameters)
        if averages:
            average(list(gradients))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data.sub_(0.1 * gradient)
    return policy


def reptile(averages: bool) -> nn.Module:
    """Steps towards what an inner loop has made of a copy; no forward pass goes through the engine."""
    model = lockstep.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for inputs in own_batches():
        inner = copy.deepcopy(model.module)
        inner_optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(2):
            inner_optimizer.zero_grad()
            inner(inputs).square().mean().backward()
            inner_optimizer.step()
        for parameter, found in zip(model.parameters(), inner.parameters(), strict=True):
            parameter.grad = parameter.data - found.data
            if averages:
                average([parameter.grad])
        optimizer.step()
    return model


def past_the_engine(body: Callable[[bool], nn.Module], averages: bool, backend: str) -> tuple[list[str], str]:
    kept: list[nn.Module] = []  # as in a script that is one function, or none
    return outcome_of(lambda: kept.append(body(averages)), backend)


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
@pytest.mark.parametrize("body", [step_by_hand, reptile])
def test_an_engine_that_averages_nothing_is_compared_at_the_end(body: Callable[..., nn.Module], backend: str) -> None:
    for told, error in run_ranks(past_the_engine, 3, body, False, backend, init=False):
        assert told == []
        assert error.startswith("ModelError: the 3 ranks have trained different models: what came past ")
        assert "DistributedDataParallel(Linear) stepped 2 parameter(s) that nobody averaged" in error
        assert "torch.autograd.grad" in error
    assert run_ranks(past_the_engine, 3, body, True, backend, init=False) == [([], "")] * 3


def look_at_checkpoints(averages: bool) -> nn.Module:
    """Each rank evaluates another checkpoint; nobody trains."""
    assert not averages
    model = lockstep.DistributedDataParallel(make_model())
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.fill_(dist.get_rank())
        model(own_batches()[0])
    model.eval()
    model(own_batches()[0])
    return model


def share_now_and_then(averages: bool) -> nn.Module:
    """Local SGD, by gradients that are not to be averaged."""
    assert not averages
    model = lockstep.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        for inputs in own_batches():
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    return model


def train_a_model_of_each_rank(averages: bool) -> nn.Module:
    """An engine of one rank, with gradients by hand."""
    assert not averages
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = lockstep.DistributedDataParallel(make_model(), process_group=groups[dist.get_rank()])
    for inputs in own_batches():
        gradients = torch.autograd.grad(model(inputs).square().mean(), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.data.sub_(0.1 * gradient)
    return model


def follow(averages: bool) -> nn.Module:
    """A teacher that follows a student, who was stepped on another kind of processor by each rank."""
    assert not averages
    teacher = lockstep.DistributedDataParallel(make_model())
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
        parameter.mul_(1 + 2e-7 * dist.get_rank())
    teacher(own_batches()[0])
    return teacher


@pytest.mark.parametrize("body", [look_at_checkpoints, share_now_and_then, train_a_model_of_each_rank, follow])
def test_engines_that_average_nothing_on_purpose_are_not(body: Callable[..., nn.Module]) -> None:
    assert run_ranks(past_the_engine, 2, body, False, "lockstep", init=False) == [([], "")] * 2
