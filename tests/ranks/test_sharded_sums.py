"""The host's one sum of sharded gradients, to which the ranks add in turns."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_checks import error_of
from lockstep import DistributedDataParallel, ZeroRedundancyOptimizer
from lockstep.errors import ModelError
from lockstep.parallel.sharded.sums import SumsInTurns
from lockstep.testing import run_ranks
from test_sharded_groups import Failing

WIDTHS = (6, 300, 400, 500, 7)  # some parameters are cut, others belong to one rank


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers).to(dtype)


def made(dtype: torch.dtype = torch.float64, cap_mb: float = 0) -> tuple[Any, Any]:
    """An engine with a bucket for each parameter, and its sharded optimizer."""
    model = DistributedDataParallel(net(dtype), bucket_cap_mb=cap_mb)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


def loss_of(model: Any, seed: int, rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return model(torch.randn(5, WIDTHS[0], generator=generator).to(dtype)).square().mean()  # type: ignore[no-any-return]


def in_order_of_turns(gradients: list[torch.Tensor], share: Any) -> torch.Tensor:
    """The mean of the ranks' gradients, each share added up as [Note: turns] says."""
    count = len(gradients)
    mean = torch.empty(gradients[0].numel(), dtype=gradients[0].dtype)
    for owner in range(count):
        first, last = share.bounds[owner : owner + 2]
        total = gradients[owner].reshape(-1)[first:last].to(torch.promote_types(mean.dtype, torch.float32), copy=True)
        for turn in range(1, count):
            total += gradients[(owner - turn) % count].reshape(-1)[first:last]
        mean[first:last] = total / count
    return mean.view(gradients[0].shape)


def far_from_order(model: Any, optimizer: Any, seed: int, dtype: torch.dtype) -> bool:
    """Whether any bit of the means differs from the documented order."""
    loss_of(model, seed, dist.get_rank(), dtype).backward()
    means, differs = optimizer.full_gradients(), []
    by_rank = []
    for rank in range(dist.get_world_size()):
        twin = net(dtype)
        twin.load_state_dict(model.module.state_dict())
        loss_of(twin, seed, rank, dtype).backward()
        by_rank.append([each.grad for each in twin.parameters()])
    for mean, parameter, *gradients in zip(means, model.parameters(), *by_rank, strict=True):
        differs.append(not torch.equal(mean, in_order_of_turns(gradients, parameter.grad.share)))
    return any(differs)


def add_up(dtype: torch.dtype, slow: int | None) -> list[bool]:
    """Three steps, in which a rank takes no turn before the ranks have met."""
    model, optimizer = made(dtype)
    found = []
    takes_none = mock.patch.object(SumsInTurns, "advance", return_value=None)
    with takes_none if dist.get_rank() == slow else contextlib.nullcontext():
        for seed in range(3):
            optimizer.zero_grad()
            found.append(far_from_order(model, optimizer, seed, dtype))
            optimizer.step()
    return found


@pytest.mark.parametrize("slow", [None, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shares_are_added_up_in_one_order(world_size: int, dtype: torch.dtype, slow: int | None) -> None:
    """Whoever is fast or slow, to the last bit."""
    assert run_ranks(add_up, world_size, dtype, slow) == [[False] * 3] * world_size


def bytes_shared() -> tuple[int, int]:
    model, _ = made()
    sums = model._reducer._transport._sums
    return sums._region.part_bytes * dist.get_world_size(), sum(each.nbytes for each in model.parameters())


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_host_holds_one_sum(world_size: int) -> None:
    """Not one copy of the gradients for each rank."""
    for taken, gradients in run_ranks(bytes_shared, world_size):
        assert gradients <= taken < 1.1 * gradients


def fail_and_train(how: str) -> bool | str:
    """A backward pass fails on all ranks when some gradients have left; in the next one rank 0 is the last to begin."""
    model, optimizer = made()
    loss_of(model, 0, dist.get_rank()).backward()
    optimizer.zero_grad()
    handle = model.module[0].register_forward_hook(lambda _, __, output: Failing.apply(output))
    loss = loss_of(model, 1, dist.get_rank())
    handle.remove()
    with mock.patch.object(Failing, "fails", True), pytest.raises(ValueError, match="this pass fails"):
        loss.backward()
    if how == "step":
        return str(error_of(optimizer.step))
    if how != "keep":
        optimizer.zero_grad(set_to_none=how == "none")
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.get("rank 1 has sent all but its last gradients")
    else:
        model.module[0].weight.register_hook(lambda _: store.set("rank 1 has sent all but its last gradients", "1"))
    return far_from_order(model, optimizer, 2, torch.float64)


@pytest.mark.parametrize("how", ["none", "zeros", "keep"])
def test_after_a_failed_backward_pass(how: str) -> None:
    """Counts of the failed pass say nothing about the next one."""
    assert run_ranks(fail_and_train, 2, how) == [False] * 2


def test_a_step_after_a_failed_backward_pass() -> None:
    for text in run_ranks(fail_and_train, 2, "step"):
        assert "has a gradient that DistributedDataParallel has not averaged" in text


def accumulate_twice() -> type:
    """Re-entrant checkpoints bring a second gradient after the first has left."""
    model, _ = made()
    inner = model.module[4]

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x.detach())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                torch.autograd.backward(inner(torch.ones(1, WIDTHS[2], dtype=x.dtype)).sum())
            return gradients[0]

    model.module[0].register_forward_hook(lambda _, __, output: Twice.apply(output))
    return type(error_of(loss_of(model, 0, dist.get_rank()).backward))


def test_a_second_gradient_after_the_first_has_left() -> None:
    assert run_ranks(accumulate_twice, 2) == [ModelError] * 2
