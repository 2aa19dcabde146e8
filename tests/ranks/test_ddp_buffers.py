"""Buffers: those of the group's first rank, on all ranks, after each step that averages gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_checks import (
    assert_averaged,
    assert_same_on_all_ranks,
    backends,
    clear,
    data,
    error_of,
    mlp,
    num_collectives,
    twins,
)
from lockstep import DistributedDataParallel
from lockstep.testing import run_ranks


def first_of(tensor: Tensor) -> Tensor:
    """The first rank's tensor. Collective."""
    copied = tensor.clone()
    dist.broadcast(copied, 0)
    return copied


def follow_the_first_rank() -> None:
    model, plain = twins(mlp(batch_norm=True), bucket_cap_mb=0)
    norm, plain_norm = model.module[1], plain[1]
    for seed in range(3):
        # Each rank's own statistics, computed with the statistics that all had before.
        plain.load_state_dict(model.module.state_dict())
        with model.no_sync() if seed == 1 else torch.enable_grad():
            output = model(data(5, 4, seed=seed))
        plain(data(5, 4, seed=seed)).sum().backward()
        output.sum().backward()
        if seed == 1:
            assert torch.equal(norm.running_mean, plain_norm.running_mean), "no_sync leaves buffers alone"
            plain.zero_grad()
            clear(model)
            continue
        assert_same_on_all_ranks(norm.running_mean, norm.running_var, norm.num_batches_tracked)
        assert torch.equal(norm.running_mean, first_of(plain_norm.running_mean))
        assert torch.equal(norm.running_var, first_of(plain_norm.running_var))
        assert norm.num_batches_tracked.item() == seed + 1
        assert_averaged(model, plain)
        clear(model, plain)
    model.eval()
    own = norm.running_mean.fill_(float(dist.get_rank())).clone()
    model(data(5, 4, seed=9)).sum().backward()
    assert torch.equal(norm.running_mean, own), "evaluation mode leaves buffers alone"


def leave_them_alone() -> None:
    model, plain = twins(mlp(batch_norm=True), broadcast_buffers=False)
    for seed in range(2):
        for each in (model, plain):
            each(data(5, 4, seed=seed)).sum().backward()
    assert torch.equal(model.module[1].running_mean, plain[1].running_mean)
    assert not torch.equal(plain[1].running_mean, first_of(plain[1].running_mean)) or dist.get_rank() == 0


class Counting(nn.Module):
    """Buffers of several dtypes and kinds; some replaced by other tensors in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=torch.float64)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("nothing", None)
        self.register_buffer("table", torch.zeros(3, 2).t())
        self.register_buffer("same_table", self.table)
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool), persistent=False)
        self.register_buffer("narrow", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("history", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        rank = dist.get_rank()
        self.steps = self.steps + 1 + rank  # another tensor each time
        with torch.no_grad():
            self.table += 10.0 * rank + 1
            self.flags[rank] = True
            self.narrow.fill_(rank + 0.5)
        self.history = torch.cat([self.history, torch.tensor([float(rank)])])  # another shape each time
        return self.linear(inputs) * self.narrow[0].double()


def keep_many_kinds() -> None:
    model = DistributedDataParallel(Counting())
    module = model.module
    for step in range(1, 4):
        model(data(2, 4)).sum().backward()
        assert module.steps.item() == step
        assert module.table.tolist() == [[step] * 3] * 2
        assert module.same_table is module.table
        assert module.flags.tolist() == [True, False, False]
        assert module.narrow.tolist() == [0.5, 0.5]
        assert module.history.tolist() == [0.0] * (step + 1)


def ride_along() -> int:
    """Collectives that a step takes, once the memory for the buffers is there."""
    model, _ = twins(mlp(batch_norm=True))
    model(data(5, 4)).sum().backward()
    before = num_collectives()
    model(data(5, 4)).sum().backward()
    return num_collectives() - before


def overwrite_between_two_backward_passes() -> None:
    """Buffers that autograd has saved are overwritten by the first of two backward passes."""
    torch.manual_seed(0)
    model, plain = twins(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    for each in (model, plain):
        first, second = each(data(5, 4, seed=1)), each(data(5, 4, seed=2))
        first.square().mean().backward()
        second.square().mean().backward()
    assert_averaged(model, plain)


@backends
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_buffers_are_those_of_the_first_rank(backend: str, world_size: int) -> None:
    run_ranks(follow_the_first_rank, world_size, backend=backend)


@backends
def test_buffers_of_each_rank(backend: str) -> None:
    run_ranks(leave_them_alone, 2, backend=backend)


@backends
def test_buffers_of_all_kinds(backend: str) -> None:
    run_ranks(keep_many_kinds, 3, backend=backend)


@backends
def test_saved_buffers_may_be_overwritten(backend: str) -> None:
    run_ranks(overwrite_between_two_backward_passes, 2, backend=backend)


def test_buffers_cost_no_collective() -> None:
    assert run_ranks(ride_along, 2) == [1, 1]


class Table(nn.Module):
    """A table that grows with the longest sample, as of rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > len(self.table):
            self.register_buffer("table", torch.ones(len(inputs)), persistent=False)
        return self.linear(inputs[:, None])[:, 0] * self.table[: len(inputs)]


def grow_a_buffer() -> str:
    model = DistributedDataParallel(Table())
    model(torch.ones(2)).sum().backward()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model(torch.ones(5))
    return str(error_of(model(torch.ones(2)).sum().backward))


def test_buffers_of_different_sizes_are_named() -> None:
    for error in run_ranks(grow_a_buffer, 2):
        assert "DistributedDataParallel's buffers, whose sizes have changed" in error
        assert "broadcast_buffers=False" in error


class Observed(nn.Module):
    """A scale that becomes one for each channel in the second forward pass, in place, as in torch.ao.quantization."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.steps:
            self.scale.resize_(8)
            self.scale.copy_(torch.arange(8.0) + 10 * dist.get_rank())
        self.steps += 1
        return self.linear(inputs) * self.scale


def resize_a_buffer() -> int:
    model = DistributedDataParallel(Observed())
    scale = model.module.scale
    for step in range(4):
        before = num_collectives()
        model(torch.ones(2, 4)).sum().backward()
        assert model.module.scale is scale
        assert scale.tolist() == ([1.0] if step == 0 else list(range(8)))
        assert_same_on_all_ranks(scale)
    return num_collectives() - before - 1


def test_buffers_may_be_resized_in_place() -> None:
    assert run_ranks(resize_a_buffer, 2) == [1, 1], "with the memory made anew once"


def resize_on_one_rank() -> str:
    """Not to be filled up from the first rank's one number, as a copy would do."""
    model = DistributedDataParallel(Observed())
    model(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 0:
        model.module.steps.zero_()
    return str(error_of(model(torch.ones(2, 4)).sum().backward))


def test_buffers_that_one_rank_resizes_are_named() -> None:
    for error in run_ranks(resize_on_one_rank, 2):
        assert "DistributedDataParallel's buffers, whose sizes have changed" in error


def train_what_torchscript_has_recorded() -> None:
    """Its buffers are in a mapping of TorchScript's own."""
    model, _ = twins(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    scripted = DistributedDataParallel(torch.jit.script(model.module))
    for _ in range(2):
        scripted(data(4, 3)).square().mean().backward()
    assert_same_on_all_ranks(*scripted.buffers())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_buffers_of_torchscript() -> None:
    run_ranks(train_what_torchscript_has_recorded, 2)
