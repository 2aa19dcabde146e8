"""`lockstep.ZeroRedundancyOptimizer` over groups without shared memory: gradients go to their owners in messages."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import lockstep
from lockstep import DistributedDataParallel, ZeroRedundancyOptimizer
from lockstep.parallel.sharded.gradients import ShardedGradient
from lockstep.testing import run_ranks
from test_sharded import OPTIMIZERS, backends, distance


def large_net() -> nn.Module:
    """Of its weights some go out by themselves, and some in one message."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 500), nn.Tanh(), nn.Linear(500, 7)).double()


def backward(model: nn.Module, seed: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    model(torch.randn(5, 6, generator=generator, dtype=torch.float64)).square().mean().backward()


def pair(kind: str, **options: Any) -> tuple[list[nn.Module], list[Any]]:
    cls, of_class = OPTIMIZERS[kind]
    models: list[nn.Module] = [DistributedDataParallel(large_net(), **options) for _ in range(2)]
    sharded = ZeroRedundancyOptimizer(models[0].parameters(), cls, **of_class)
    return models, [sharded, cls(models[1].parameters(), **of_class)]


def train(kind: str, **options: Any) -> tuple[float, float, float]:
    """Accumulated, averaged twice, left out, clipped: how far from the plain optimizer.

    Returns:
        Parameters, norm, and gradients that are whole.
    """
    models, optimizers = pair(kind, **options)
    rank = dist.get_rank()
    norms = [0.0, 0.0]
    for seed in range(5):
        for position, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad(set_to_none=seed != 3)
            with model.no_sync():  # type: ignore[operator]
                backward(model, 10 * seed, rank)
            backward(model, 10 * seed + 1, rank)
            if seed % 2:  # averaged twice: the means add up
                backward(model, 10 * seed + 2, rank)
            if seed == 1:
                continue  # without a step
            norms[position] = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
    ours, plain = models
    full = optimizers[0].full_gradients()
    apart = max(float((a - b.grad).abs().max()) for a, b in zip(full, plain.parameters(), strict=True))  # type: ignore[operator]
    assert all(isinstance(each.grad, ShardedGradient) for each in ours.parameters()) is (dist.get_world_size() > 1)
    return distance(ours, plain), abs(norms[0] / norms[1] - 1), apart


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["momentum", "adam", "adafactor"])
def test_the_training_of(kind: str, world_size: int) -> None:
    """Adafactor: whole parameters, each on one rank."""
    for far, norm, apart in run_ranks(train, world_size, kind, backend="gloo"):
        assert far <= 1e-12
        assert norm <= 1e-12
        assert apart <= 1e-14


@pytest.mark.parametrize("cap_mib", [0, 0.3])
def test_buckets_of_which_some_ranks_have_no_share(cap_mib: float) -> None:
    for far, _, _ in run_ranks(functools.partial(train, "adam", bucket_cap_mb=cap_mib), 3, backend="gloo"):
        assert far <= 1e-12


def train_in_subgroup() -> float:
    """Ranks 1 and 2 of three, which are 0 and 1 of their group."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return 0.0
    models, optimizers = pair("adam", process_group=group)
    for seed in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, seed, dist.get_rank())
            optimizer.step()
    return distance(*models)


def test_a_group_of_some_ranks() -> None:
    assert max(run_ranks(train_in_subgroup, 3, backend="gloo")) <= 1e-12


def unfreeze_between() -> float:
    """A gradient that is kept over two averaged passes, with other buckets in the second."""
    models, optimizers = pair("momentum")
    for model, optimizer in zip(models, optimizers, strict=True):
        last = model.module[4]  # type: ignore[index,union-attr]
        last.requires_grad_(False)
        backward(model, 0, dist.get_rank())
        last.requires_grad_(True)
        backward(model, 1, dist.get_rank())
        optimizer.step()
    return distance(*models)


@backends
@pytest.mark.parametrize("world_size", [2, 3])
def test_unfreezing_between_two_averaged_passes(backend: str, world_size: int) -> None:
    assert max(run_ranks(unfreeze_between, world_size, backend=backend)) <= 1e-12


def read_epochs() -> list[Tensor]:
    """23 samples in batches of 8, of which the last is divided by no number of ranks."""
    model = DistributedDataParallel(large_net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    inputs = torch.randn(23, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loader = lockstep.DataLoader(torch.utils.data.TensorDataset(inputs), 8, shuffle=True, seed=3)
    for _ in range(2):
        for (rows,) in loader:
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_batches_are_those_of_one_process(world_size: int) -> None:
    alone = run_ranks(read_epochs, 1, backend="gloo")[0]
    for found in run_ranks(read_epochs, world_size, backend="gloo"):
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


class Failing(torch.autograd.Function):
    """Backward passes fail here when they are told to."""

    fails = False

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:  # type: ignore[override]
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if Failing.fails:
            raise ValueError("this pass fails")
        return gradient


class FailingNet(nn.Module):
    """Its last layer has sent its gradients when the first fails."""

    def __init__(self) -> None:
        super().__init__()
        self.net = large_net()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net[2:](Failing.apply(self.net[:2](inputs)))  # type: ignore[index,no-any-return]


def go_on_after_a_failure() -> float:
    models = [DistributedDataParallel(FailingNet(), bucket_cap_mb=0.1) for _ in range(2)]
    optimizers = [
        ZeroRedundancyOptimizer(models[0].parameters(), torch.optim.Adam, lr=1e-3),
        torch.optim.Adam(models[1].parameters(), lr=1e-3),
    ]
    for seed in range(4):
        Failing.fails = seed == 1
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            if Failing.fails:
                with pytest.raises(ValueError, match="this pass fails"):
                    backward(model, seed, dist.get_rank())
            else:
                backward(model, seed, dist.get_rank())
                optimizer.step()
    return distance(*models)


def test_a_pass_that_failed_on_all_ranks_leaves_nothing_behind() -> None:
    assert max(run_ranks(go_on_after_a_failure, 2, backend="gloo")) <= 1e-12


def let_go() -> list[list[bool]]:
    """Whether the memory of autograd's gradients is free: after the backward pass, and after the step."""
    model = DistributedDataParallel(large_net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    found: list[StorageWeakRef] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: found.append(StorageWeakRef(gradient.untyped_storage())))
    backward(model, 0, dist.get_rank())
    are_free = [[each.expired() for each in found]]
    optimizer.step()
    return [*are_free, [each.expired() for each in found]]


def test_gradients_stay_where_they_are_until_the_step() -> None:
    for after_backward, after_step in run_ranks(let_go, 2, backend="gloo"):
        assert not all(after_backward)
        assert after_step == [True] * 6


def average_whole() -> tuple[bool, float, bool]:
    """With torch's engine."""
    theirs = nn.parallel.DistributedDataParallel(large_net())
    plain = nn.parallel.DistributedDataParallel(large_net())
    optimizers = [
        ZeroRedundancyOptimizer(theirs.parameters(), torch.optim.Adam, lr=1e-3),
        torch.optim.Adam(plain.parameters(), lr=1e-3),
    ]
    for seed in range(2):
        for model, optimizer in zip((theirs, plain), optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, seed, dist.get_rank())
            optimizer.step()
    grads = [each.grad for each in theirs.parameters()]
    are_full = all(a is b for a, b in zip(grads, optimizers[0].full_gradients(), strict=True))  # type: ignore[attr-defined]
    return all(type(each) is Tensor for each in grads), distance(theirs, plain), are_full


def test_gradients_of_torchs_engine_stay_whole() -> None:
    assert run_ranks(average_whole, 2, backend="gloo") == [(True, 0.0, True)] * 2


def what_is_left() -> list[bool]:
    """Of a training that ends with gradients in place: whether parameter, optimizer, engine and group still exist."""
    group = dist.new_group()
    model = DistributedDataParallel(nn.Linear(5, 5), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    dist.destroy_process_group(group)
    found = [weakref.ref(each) for each in (model.module.weight, optimizer, model, group)]
    del model, optimizer, group
    gc.collect()
    return [each() is not None for each in found]


@backends
def test_nothing_is_left_of_a_training(backend: str) -> None:
    assert run_ranks(what_is_left, 2, backend=backend) == [[False] * 4] * 2
