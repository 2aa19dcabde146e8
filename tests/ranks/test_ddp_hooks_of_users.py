"""What users do to gradients and parameters around the engine: hooks, checkpoints, freezing, replacing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep
from ddp_checks import assert_same_on_all_ranks, backends
from lockstep import DistributedDataParallel
from lockstep.errors import ModelError
from lockstep.testing import run_ranks

TOLERANCE = 1e-12


def stack(width: int = 64, count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(count)]).double()


# ---- hooks that change gradients as they come ----------------------------------------------------------


def in_place(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3)


def out_of_place(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clamp(-1e-3, 1e-3)


def hook_gradients(hook: Callable[[Tensor], None], width: int, **options: Any) -> float:
    """How far gradients are from the mean over ranks of hooked ones."""
    model, plain = DistributedDataParallel(stack(width), **options), stack(width)
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.register_post_accumulate_grad_hook(hook)
    inputs = torch.randn(5, width, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    worst = 0.0
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            each(inputs).square().mean().backward()
        for ours, own in zip(model.parameters(), plain.parameters(), strict=True):
            expected = own.grad.clone()
            dist.all_reduce(expected)
            worst = max(worst, (ours.grad - expected / dist.get_world_size()).abs().max().item())
    return worst


@backends
@pytest.mark.parametrize("hook", [in_place, out_of_place])
@pytest.mark.parametrize(("width", "options"), [(64, {"bucket_cap_mb": 0.01}), (64, {}), (300, {})], ids=str)
def test_hooks_of_users_run_before_gradients_are_sent(
    hook: Callable[[Tensor], None], width: int, options: dict[str, Any], backend: str
) -> None:
    assert max(run_ranks(hook_gradients, 2, hook, width, backend=backend, **options)) <= TOLERANCE


# ---- re-entrant checkpoints around all parameters -------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(count)]).double()

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=True)
        return x * 2.0


def train_checkpointed(count: int, **options: Any) -> float:
    results = []
    for alone in (True, False):
        net = Checkpointed(count)
        model = net if alone else DistributedDataParallel(net, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(*torch.randn(2, 11, 3, generator=generator, dtype=torch.float64).unbind())
        place = {"rank": 0, "world_size": 1} if alone else {}
        for _ in range(2):
            for x, y in lockstep.DataLoader(data, 4, **place):
                optimizer.zero_grad()
                mse_loss(model(x.requires_grad_()), y).backward()
                optimizer.step()
        results.append(torch.cat([parameter.detach().flatten() for parameter in net.parameters()]))
    return (results[0] - results[1]).abs().max().item()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0}, {"static_graph": True}, {"find_unused_parameters": True, "bucket_cap_mb": 0}],
    ids=str,
)
def test_a_model_inside_of_reentrant_checkpoints(count: int, options: dict[str, Any]) -> None:
    assert max(run_ranks(train_checkpointed, 2, count, **options)) <= TOLERANCE


# ---- parameters that the engine does not know -----------------------------------------------------------


def change_parameters(change: str) -> str:
    net = stack(8)
    model = DistributedDataParallel(net)
    for step in range(20):
        if step == 3 and change == "assigned":
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 8, dtype=torch.float64)).mean().backward()
        try:
            optimizer.step()
        except ModelError as error:
            return f"{step}: {error}"
    return "no error"


@pytest.mark.parametrize(("change", "at"), [("assigned", 3), ("nothing", None)])
def test_parameters_that_nobody_averages_are_an_error(change: str, at: int | None) -> None:
    for said in run_ranks(change_parameters, 2, change):
        if at is None:
            assert said == "no error"
        else:
            assert said.startswith(f"{at}: ")
            assert "require a gradient that is not averaged: " in said
            assert "0.weight" in said


def call_with_other_parameters() -> None:
    net = stack(8)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 8, dtype=torch.float64)
    others = {name: value.detach().clone() for name, value in model.named_parameters()}
    for _ in range(3):
        grad(lambda values: functional_call(model, values, (x,)).sum())(others)
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    assert_same_on_all_ranks(*net.parameters())


def test_functional_calls_are_left_alone() -> None:
    run_ranks(call_with_other_parameters, 2)


def transform_beside_training(begin: int, clones: bool, of_inputs: bool) -> list[bool | str]:
    """11 samples in batches of 4: 2 ranks do not divide the last one, and on rank 0 its size is that of the others."""
    net = stack(8)
    model, alone = DistributedDataParallel(net), stack(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(torch.arange(88.0, dtype=torch.float64).view(11, 8) / 88)
    found: list[bool | str] = []
    for epoch in range(3):
        for step, (x,) in enumerate(lockstep.DataLoader(samples, 4)):
            x = x.clone() if clones else x
            if 3 * epoch + step >= begin:
                alone.load_state_dict(net.state_dict())
                take = gradients_of_input if of_inputs else gradients_of_copies
                try:
                    found.append(all(map(torch.equal, take(model, x), take(alone, x))))
                except ModelError as error:
                    found.append(str(error))
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    assert_same_on_all_ranks(*net.parameters())
    return found


def gradients_of_copies(model: nn.Module, x: Tensor) -> list[Tensor]:
    copies = {name: value.detach() for name, value in model.named_parameters()}
    return list(grad(lambda values: functional_call(model, values, (x,)).mean())(copies).values())


def gradients_of_input(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [grad(lambda value: model(value).mean())(x)]


@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize("clones", [False, True])
def test_transforms_of_torch_func_beside_training(begin: int, clones: bool) -> None:
    """From the first step on, or when the engine no longer watches all parameters."""
    for found in run_ranks(transform_beside_training, 2, begin, clones, of_inputs=False):
        assert found == [True] * (9 - begin)


@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize("clones", [False, True])
def test_gradients_by_torch_func_that_a_penalty_may_contain(begin: int, clones: bool) -> None:
    """They depend on the model's own parameters: refused where a loss that contains them would count wrongly."""
    for found in run_ranks(transform_beside_training, 2, begin, clones, of_inputs=True):
        for step, outcome in enumerate(found, start=begin):
            assert outcome is True if step % 3 != 2 else "that is not split evenly between the ranks" in str(outcome)


class Turned(nn.Module):
    """Two buckets, for two dtypes; `b` is not in the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turn = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).double() * self.turn


def freeze_for_a_while(part: str, begin: int) -> list[float]:
    net = Turned()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    frozen = list((net if part == "all" else net.get_submodule(part)).parameters())
    norms = []
    for step in range(begin + 4):
        is_frozen = begin <= step < begin + 2
        for parameter in frozen:
            parameter.requires_grad_(not is_frozen)
        model.zero_grad()
        output = model(torch.full((2, 4), dist.get_rank() + 1.0)).mean()
        if output.requires_grad:
            output.backward()
        found = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
        assert_same_on_all_ranks(*found)
        norms.append(float(sum(each.norm() for each in found)))
    return norms


@pytest.mark.parametrize("part", ["a", "b", "all"])
@pytest.mark.parametrize("begin", [0, 1, 5])
def test_parts_may_be_frozen_for_a_while(part: str, begin: int) -> None:
    """From the first step on, or when the engine no longer watches all parameters."""
    (norms, again) = run_ranks(freeze_for_a_while, 2, part, begin)
    assert norms == again
    assert norms[-1] > 0
    assert (norms[begin] == 0) == (part == "all")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.v = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (x * w * self.v).sum(1)


def hand_a_parameter_over() -> float:
    gradients = []
    for alone in (True, False):
        net = Tied()
        model = net if alone else DistributedDataParallel(net)
        data = TensorDataset(torch.arange(27.0, dtype=torch.float64).view(9, 3))
        for (x,) in lockstep.DataLoader(data, 4, **({"rank": 0, "world_size": 1} if alone else {})):
            model.zero_grad()
            model(x, net.w).mean().backward()
            gradients.append(net.w.grad.clone())
    half = len(gradients) // 2
    return (torch.stack(gradients[:half]) - torch.stack(gradients[half:])).abs().max().item()


def test_a_parameter_that_is_handed_over_is_weighted_as_in_the_model() -> None:
    assert max(run_ranks(hand_a_parameter_over, 2)) <= TOLERANCE
