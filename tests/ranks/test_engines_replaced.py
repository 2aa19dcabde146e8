"""A model that is wrapped anew: what ranks decide does not depend on when the engine of before is collected."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_checks import assert_same_on_all_ranks
from lockstep import DistributedDataParallel
from lockstep.testing import run_ranks


class Trainer:
    """Part of a reference cycle, as trainers with callbacks are: it lives until the garbage collector comes."""

    def __init__(self, net: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self.model = DistributedDataParallel(net, process_group=group)
        self.callbacks = [self.step]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        self.loss().backward()
        optimizer.step()

    def loss(self) -> Tensor:
        return self.model(torch.full((3, 2), float(dist.get_rank()))).square().mean()


@contextmanager
def collected_on_rank_0_only() -> Iterator[Callable[[], None]]:
    """Gives a function that collects garbage on rank 0; no rank does otherwise."""
    gc.collect()
    gc.disable()
    try:
        yield lambda: None if dist.get_rank() else void(gc.collect())
    finally:
        gc.enable()


def void(_: object) -> None:
    pass


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def train_anew(leaves_a_forward_pass: bool, accumulates: bool, regularises: bool) -> None:
    """Trains one model in two trainers, one after the other."""
    with collected_on_rank_0_only() as collect:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        first = Trainer(net)
        first.step(optimizer)
        if leaves_a_forward_pass:
            first.loss()
        second = Trainer(net)
        del first
        collect()
        for _ in range(3):
            if accumulates:
                with second.model.no_sync():
                    second.loss().backward()
                second.loss().backward()
                optimizer.step()
            if regularises:
                sum(parameter.square().sum() for parameter in net.parameters()).backward()
                optimizer.step()
            second.step(optimizer)
        assert_same_on_all_ranks(*(parameter.detach() for parameter in net.parameters()))


@pytest.mark.parametrize(
    ("leaves_a_forward_pass", "accumulates", "regularises"),
    [(False, False, False), (True, False, False), (False, True, False), (False, False, True), (True, False, True)],
)
def test_a_model_is_wrapped_anew(leaves_a_forward_pass: bool, accumulates: bool, regularises: bool) -> None:
    run_ranks(train_anew, 2, leaves_a_forward_pass, accumulates, regularises)


def unfreeze_and_wrap_anew() -> None:
    """What the engine's error says to do, while somebody keeps the engine of before."""
    net = small_net()
    net[1].requires_grad_(False)
    kept = Trainer(net)
    kept.step(torch.optim.SGD(net.parameters(), 0.1))
    net[1].requires_grad_(True)
    Trainer(net).step(torch.optim.SGD(net.parameters(), 0.1))
    assert_same_on_all_ranks(*(parameter.detach() for parameter in net.parameters()))


def test_a_model_is_unfrozen_and_wrapped_anew() -> None:
    run_ranks(unfreeze_and_wrap_anew, 2)


def train_alone_what_was_frozen() -> list[float]:
    """After a trainer that is gone, each rank trains what that had frozen, by itself."""
    with collected_on_rank_0_only() as collect:
        net = small_net()
        net[1].requires_grad_(False)
        Trainer(net).step(torch.optim.SGD(net.parameters(), 0.1))
        net[1].requires_grad_(True)
        optimizer = torch.optim.SGD(net[1].parameters(), 0.1)
        collect()
        for _ in range(2):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return [float(parameter.detach().sum()) for parameter in net.parameters()]


def test_a_rank_trains_alone_what_was_frozen() -> None:
    found = run_ranks(train_alone_what_was_frozen, 2)
    assert found[0] == found[1]


def minimise_in_a_part_of_the_ranks() -> list[Tensor]:
    """By LBFGS, in the first two of three ranks, a model that all three trained before."""
    part = dist.new_group([0, 1])
    with collected_on_rank_0_only() as collect:
        net = small_net()
        first = Trainer(net)
        first.step(torch.optim.SGD(net.parameters(), 0.1))
        del first
        collect()
        if dist.get_rank() == 2:
            return []
        second = Trainer(net, part)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = second.loss()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).detach() for _ in range(2)]
        return [*losses, *(parameter.detach() for parameter in net.parameters())]


def test_lbfgs_over_fewer_ranks_than_before() -> None:
    first, second, _ = run_ranks(minimise_in_a_part_of_the_ranks, 3)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


def minimise_alone() -> float:
    """By LBFGS, each rank by itself, and not the same, a model that they trained together before."""
    with collected_on_rank_0_only() as collect:
        net = small_net()
        trainer = Trainer(net)
        trainer.step(torch.optim.SGD(net.parameters(), 0.1))
        del trainer
        collect()
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2 + dist.get_rank())

        def closure() -> Tensor:
            optimizer.zero_grad()
            net(torch.zeros(1, 2)).sum().backward()
            return torch.tensor(float(dist.get_rank()))

        return float(optimizer.step(closure))


def test_a_rank_minimises_alone_what_was_trained_together() -> None:
    assert run_ranks(minimise_alone, 2) == [0.0, 1.0]
