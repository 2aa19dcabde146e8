"""Forward passes that one rank lets no backward pass follow: what becomes of its later steps is worth a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lockstep
from ddp_checks import backends, mlp, warnings_of_lockstep
from lockstep import DistributedDataParallel
from lockstep.parallel.claims import ClaimCheck, Claims
from lockstep.rank_zero import collective_device
from lockstep.testing import run_ranks

WARNING = "different numbers of forward passes that no backward pass followed"


def batches() -> list[Tensor]:
    """Of this rank: 6 of 4 rows, by torch's loader."""
    data = TensorDataset(torch.randn(24 * dist.get_world_size(), 4, generator=torch.Generator().manual_seed(0)))
    return [inputs for (inputs,) in DataLoader(data, 4, sampler=DistributedSampler(data))]


def step(model: Any, inputs: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
    model(inputs).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


# ---- what is warned of -----------------------------------------------------------------------------------


def skip_steps(skipped: dict[int, set[int]]) -> list[str]:
    """Ranks leave out the backward passes of some batches, and all end with as many steps."""
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = skipped.get(dist.get_rank(), set())
    longest = max(map(len, skipped.values()))
    given = [inputs for number, inputs in enumerate(batches()) if number < 6 - longest + len(mine)]
    with warnings_of_lockstep() as told:
        for number, inputs in enumerate(given):
            loss = model(inputs).square().mean()
            if number not in mine:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
    return [message for message in told if WARNING in message]


@backends
@pytest.mark.parametrize(
    ("skipped", "said", "said_over_gloo"),
    [
        ({1: {1}}, "(rank 0: 0, rank 1: 1; ranks", "(0 on one, 1 on another; ranks"),
        ({0: {2}}, "(rank 0: 1, rank 1: 0; ranks", "(0 on one, 1 on another; ranks"),
        ({1: {1, 2}}, "(rank 0: 0, rank 1: 2; ranks", "(0 on one, 2 on another; ranks"),
        ({1: {0, 2}}, "(rank 0: 0, rank 1: 1; ranks", "(0 on one, 1 on another; ranks"),
    ],
    ids=str,
)
def test_a_skipped_backward_pass(backend: str, skipped: dict[int, set[int]], said: str, said_over_gloo: str) -> None:
    told, of_others = run_ranks(skip_steps, 2, skipped, backend=backend)
    (message,) = told
    assert WARNING in message
    assert (said if backend == "lockstep" else said_over_gloo) in message
    assert "dist.all_reduce(flag, dist.ReduceOp.MAX)" in message
    assert of_others == []


@backends
def test_it_is_said_of_more_ranks(backend: str) -> None:
    told, *of_others = run_ranks(skip_steps, 3, {2: {3}}, backend=backend)
    (message,) = told
    assert ("rank 0: 0, rank 1: 0, rank 2: 1" if backend == "lockstep" else "0 on one, 1 on another") in message
    assert of_others == [[], []]


# ---- what is not -----------------------------------------------------------------------------------------


def accumulated(model: Any) -> None:
    for number, inputs in enumerate(batches()):
        if number % 3 == 2:
            step(model, inputs)
        else:
            with model.no_sync():
                step(model, inputs)


def accumulated_by_other_numbers(model: Any) -> None:
    """A rank leaves out a batch of a window, and not the last, which averages."""
    for number, inputs in enumerate(batches()):
        if number % 3 == 2:
            step(model, inputs)
        else:
            with model.no_sync():
                loss = model(inputs).mean()
                if (number + dist.get_rank()) % 3:
                    loss.backward()


def several_at_once(model: Any) -> None:
    for inputs in batches():
        (model(inputs).mean() + model(-inputs).square().mean()).backward()


def adversaries(model: Any) -> None:
    judge = DistributedDataParallel(nn.Linear(3, 1))
    for inputs in batches():
        made = model(inputs)
        judge(torch.ones(4, 3)).mean().backward()
        judge(made.detach()).mean().backward()
        judge(made).mean().backward()


def adversaries_frozen(model: Any) -> None:
    judge = DistributedDataParallel(nn.Linear(3, 1))
    for inputs in batches():
        judge.requires_grad_(False)
        judge(model(inputs)).mean().backward()
        judge.requires_grad_(True)
        (judge(torch.ones(4, 3)) - judge(model(inputs).detach())).mean().backward()


def checkpointed(model: Any) -> None:
    for inputs in batches():
        for use_reentrant in (False, True):
            checkpoint(model, inputs.requires_grad_(), use_reentrant=use_reentrant).mean().backward()


def ahead(model: Any) -> None:
    """The forward pass of the next batch comes before the backward pass of this one."""
    losses: list[Tensor] = []
    for inputs in batches():
        losses.append(model(inputs).mean())
        if len(losses) > 1:
            losses.pop(0).backward()
    losses.pop().backward()


def twice(model: Any) -> None:
    for inputs in batches():
        loss = model(inputs).mean()
        loss.backward(retain_graph=True)
        loss.backward()


def episodes(model: Any) -> None:
    """As many forward passes as an episode has steps, and one backward pass."""
    for inputs in batches()[:3]:
        losses = [model(inputs * number).square().mean() for number in range(2 + 3 * dist.get_rank())]
        torch.stack(losses).mean().backward()


def evaluated(model: Any) -> None:
    for number, inputs in enumerate(batches()):
        step(model, inputs)
        if number % 2 and dist.get_rank() == 0:
            with torch.no_grad():
                model(inputs)
            model.eval()
            model(inputs)  # with a graph that nobody needs
            model.train()


def skipped_by_all(model: Any) -> None:
    for number, inputs in enumerate(batches()):
        loss = model(inputs).mean()
        if number % 3:
            loss.backward()


def outputs_left_out(model: Any) -> None:
    for inputs in batches():
        model(inputs)[:, 0].mean().backward()


def own_loader(model: Any) -> None:
    data = TensorDataset(torch.randn(11, 4, generator=torch.Generator().manual_seed(0)))
    for _ in range(2):
        for (inputs,) in lockstep.DataLoader(data, 3):
            step(model, inputs)


def own_loader_looked_at(model: Any) -> None:
    """Batches with tags say by themselves which step they belong to."""
    data = TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(0)))
    for (inputs,) in lockstep.DataLoader(data, 6):
        if dist.get_rank() == 0:
            model(inputs)
        step(model, inputs)


def joined(model: Any) -> None:
    for _ in range(2):
        with model.join():
            for inputs in batches()[: 2 + dist.get_rank()]:
                step(model, inputs[: 1 + dist.get_rank()])
    for inputs in batches():
        step(model, inputs)


PROGRAMS = [accumulated, accumulated_by_other_numbers, several_at_once, adversaries, adversaries_frozen, checkpointed]
PROGRAMS += [ahead, twice, episodes, evaluated, skipped_by_all, outputs_left_out, own_loader, joined]


def run_program(program: Callable[[Any], None]) -> list[str]:
    torch.manual_seed(0)
    model = DistributedDataParallel(mlp())
    with warnings_of_lockstep() as told:
        program(model)
    return [message for message in told if WARNING in message]


@backends
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_ordinary_programs_are_left_in_peace(backend: str, program: Callable[[Any], None]) -> None:
    assert run_ranks(run_program, 3, program, backend=backend) == [[]] * 3


def test_batches_with_tags_are_compared_themselves() -> None:
    assert run_ranks(run_program, 2, own_loader_looked_at) == [[], []]


def compare(num_open: int, text: str = "4 rows") -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    with warnings_of_lockstep() as told:
        ClaimCheck(group, collective_device(group)).begin(Claims(text, False, num_open=num_open))()
    return [message for message in told if WARNING in message]


def compare_by_rank(numbers: list[int]) -> list[str]:
    return compare(numbers[dist.get_rank()])


@pytest.mark.parametrize(("numbers", "said"), [([-1, 2], "-1 on one, 2 on another"), ([3, 3], "")], ids=str)
def test_numbers_travel_with_claims(numbers: list[int], said: str) -> None:
    told, of_others = run_ranks(compare_by_rank, 2, numbers, backend="gloo")
    assert [said in message for message in told] == ([True] if said else [])
    assert of_others == []
