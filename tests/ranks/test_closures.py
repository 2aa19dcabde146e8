"""LBFGS on several ranks gives what it gives on one: it decides by the loss of the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import lockstep
from ddp_checks import assert_same_on_all_ranks
from lockstep import DistributedDataParallel, batch
from lockstep.errors import CollectiveMismatch, InputError
from lockstep.testing import run_ranks

SAMPLES = 13  # divides by no world size of these tests
# The mean of ranks' means is rounded elsewhere than one process's mean, which a line search passes on.
TOLERANCE = 1e-10


class OwnLBFGS(torch.optim.LBFGS):
    """A subclass with a step of its own."""

    def step(self, closure: Any) -> Any:
        return super().step(closure)


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    """A model, inputs and targets whose parts have very different losses."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    targets = (inputs.sum(1, keepdim=True) * 2).tanh() * torch.linspace(0.1, 3, SAMPLES, dtype=torch.float64)[:, None]
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double(), inputs, targets


def minimise(kind: type[torch.optim.LBFGS], line_search: str | None, by_name: bool) -> list[Tensor]:
    """Parameters and losses of some steps; the same bits on all ranks."""
    net, inputs, targets = problem()
    model = DistributedDataParallel(net)
    optimizer = kind(model.parameters(), lr=0.5, max_iter=6, line_search_fn=line_search)
    own = slice(*batch.share.share_bounds(SAMPLES, dist.get_rank(), dist.get_world_size()))

    def closure() -> Tensor:
        optimizer.zero_grad()
        with model.samples(own.stop - own.start):
            loss = mse_loss(model(inputs[own]), targets[own])
        loss.backward()
        return loss

    losses = [optimizer.step(closure=closure) if by_name else optimizer.step(closure) for _ in range(4)]
    results = [*(parameter.detach() for parameter in net.parameters()), torch.stack(losses).detach()]
    assert_same_on_all_ranks(*results)
    return results


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("line_search", ["strong_wolfe", None])
@pytest.mark.parametrize(
    ("kind", "by_name"), [(torch.optim.LBFGS, False), (torch.optim.LBFGS, True), (OwnLBFGS, False)]
)
def test_several_ranks_end_where_one_does(
    kind: type[torch.optim.LBFGS], by_name: bool, line_search: str | None, world_size: int
) -> None:
    (expected,) = run_ranks(minimise, 1, kind, line_search, by_name)
    for found in run_ranks(minimise, world_size, kind, line_search, by_name):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def walk_batches(form: str, samples: int = 9, batch_size: int = 4) -> list[Tensor]:
    """Parameters and losses of a closure that walks through a loader, whose last batch leaves rank 1 of 2 a filler."""
    net, inputs, targets = problem()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe")
    loader = lockstep.DataLoader(TensorDataset(inputs[:samples], targets[:samples]), batch_size)
    kept = list(loader)

    def closure() -> Any:
        optimizer.zero_grad()
        total: Any = 0.0
        for x, y in kept if form == "kept" else loader:
            loss = mse_loss(model(x), y)
            if form == "first":
                loss = lockstep.mean(loss * len(y), len(y))
            if form in ("first", "graph"):
                total = total + loss
                continue
            loss.backward()
            total += loss.item() if form == "number" else lockstep.mean(loss * len(y), len(y)).item()
        if isinstance(total, Tensor):
            total.backward()
        return total

    losses = torch.tensor([float(optimizer.step(closure)) for _ in range(3)], dtype=torch.float64)
    return [*(parameter.detach() for parameter in net.parameters()), losses]


@pytest.mark.parametrize("form", ["first", "behind", "kept"])
def test_closures_may_walk_through_batches(form: str) -> None:
    """What the refusal of other forms says to write works: before the backward pass and behind it, for kept batches."""
    (expected,) = run_ranks(walk_batches, 1, "number")
    for found in run_ranks(walk_batches, 2, form):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def refuse_batches(form: str, samples: int, batch_size: int) -> str:
    with pytest.raises(InputError) as caught:
        walk_batches(form, samples, batch_size)
    return str(caught.value)


@pytest.mark.parametrize("form", ["number", "graph"])
@pytest.mark.parametrize(("world_size", "samples", "batch_size"), [(2, 9, 4), (3, 12, 8)])
def test_sums_over_batches_that_ranks_divide_differently_are_refused(
    form: str, world_size: int, samples: int, batch_size: int
) -> None:
    """On all ranks, though the last of three has the same weight in both batches: 2 of 8 samples, and 1 of 4."""
    for message in run_ranks(refuse_batches, world_size, form, samples, batch_size):
        assert message.startswith("LBFGS: the closure's loss differs between ranks, and has no graph")
        assert "total += lockstep.mean(loss * len(y), len(y)).item()" in message


def step_on_one_rank(evaluates: bool, follows: bool) -> None:
    """MACE: rank 0 steps and tells the others when to call the closure, whose collectives are the same for all."""
    net, inputs, targets = problem()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    rank, signal = dist.get_rank(), torch.zeros(1)
    steps_here = rank == 0 or follows

    def closure() -> Tensor:
        if not follows:
            if rank == 0:
                dist.broadcast(signal.fill_(1), 0)
            for parameter in model.parameters():
                dist.broadcast(parameter.detach(), 0)
        optimizer.zero_grad()
        loss = mse_loss(model(inputs[rank::2][:6]), targets[rank::2][:6])
        loss.backward()
        if not follows:
            dist.all_reduce(loss.detach())
        return loss

    for _ in range(2):
        if evaluates:
            model(inputs[:2])
        if steps_here:
            optimizer.step(closure)
            continue
        while dist.broadcast(signal, 0) is None and signal:
            closure()
    assert_same_on_all_ranks(*model.parameters())


@pytest.mark.parametrize("evaluates", [False, True])
def test_steps_of_one_rank_are_an_error_that_says_what_to_write(evaluates: bool) -> None:
    stepped, other = run_ranks(step_on_one_rank, 2, evaluates, False, expect_errors=True)
    assert isinstance(stepped, CollectiveMismatch)
    assert isinstance(other, CollectiveMismatch)
    assert "optimizer.step (in its all_" in str(stepped)
    assert "call optimizer.step(closure) on every rank, not on one while the others call the closure" in str(stepped)
    run_ranks(step_on_one_rank, 2, evaluates, True)


def losses_of_closures() -> list[Any]:
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    rank = dist.get_rank()

    def found_of(loss_of: Any) -> Any:
        return optimizer.step(lambda: loss_of(model(torch.ones(1, 1)).sum() * 0))

    found = [
        found_of(lambda zero: zero + 1.0 + rank),
        found_of(lambda zero: zero.double().view(1) + 3.0 * rank),
        found_of(lambda _: 4.0),
        found_of(lambda _: torch.tensor(5.0)),
    ]
    # Rank 1 holds a filler, whose loss may be anything.
    filler = torch.tensor(2.0 if rank == 0 else torch.nan)
    with batch.hand.hold(batch.share.BatchShare(2 * (rank == 0), 2, 2)):
        found.append(found_of(lambda zero: zero + filler))
    return found


def test_losses_keep_their_kind_and_are_weighted() -> None:
    for plain, of_one, number, constant, weighted in run_ranks(losses_of_closures, 2):
        torch.testing.assert_close(plain, torch.tensor(1.5), rtol=0, atol=0)  # the dtype, too
        torch.testing.assert_close(of_one, torch.tensor([1.5], dtype=torch.float64), rtol=0, atol=0)
        assert not of_one.requires_grad
        assert number == 4.0
        assert constant == 5.0
        assert weighted == 2.0


def other_optimizers() -> list[float]:
    """Closures of SGD, and of an LBFGS that steps what no engine averages, return what they return."""
    model, alone = DistributedDataParallel(nn.Linear(2, 1)), nn.Linear(2, 1)
    found = []
    for optimizer in (torch.optim.SGD(model.parameters(), 0.0), torch.optim.LBFGS(alone.parameters(), max_iter=1)):

        def closure() -> Tensor:
            for net in (model, alone):
                net.zero_grad()
                net(torch.ones(1, 2)).sum().backward()
            return torch.tensor(float(dist.get_rank()))

        found.append(float(optimizer.step(closure)))
    return found


def test_other_closures_are_left_alone() -> None:
    assert run_ranks(other_optimizers, 2) == [[0.0, 0.0], [1.0, 1.0]]
