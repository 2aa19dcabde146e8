"""The ranks average gradients of one and the same batch, or it is an error that names the batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import lockstep
from ddp_checks import error_of
from lockstep import DistributedDataParallel
from lockstep.errors import CollectiveMismatch
from lockstep.parallel.claims import check_stamps, stamp_of
from lockstep.testing import run_ranks


def make(num_samples: int) -> tuple[DistributedDataParallel, lockstep.DataLoader]:
    torch.manual_seed(0)
    data = torch.arange(float(num_samples), dtype=torch.float64).view(-1, 1)
    return DistributedDataParallel(nn.Linear(1, 1).double()), lockstep.DataLoader(TensorDataset(data), 4)


def backward(model: nn.Module, inputs: Tensor) -> None:
    mse_loss(model(inputs), torch.ones_like(inputs)).backward()


def skip_one(num_samples: int, accumulate: bool) -> str:
    """Rank 1 leaves out the backward pass of the second batch."""
    model, loader = make(num_samples)
    for number, (inputs,) in enumerate(loader):
        model.zero_grad()
        if number == 1 and dist.get_rank() == 1:
            continue
        if number == 1 + dist.get_rank():
            if accumulate:
                with model.no_sync():
                    backward(model, inputs)
            error = error_of(backward, model, inputs)
            assert isinstance(error, CollectiveMismatch)
            break
        backward(model, inputs)
    total = torch.ones(1)
    dist.all_reduce(total)  # the group still works
    assert total.item() == dist.get_world_size()
    return str(error)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("num_samples", [16, 17])
def test_a_skipped_backward_pass_is_an_error_that_names_the_batches(num_samples: int, accumulate: bool) -> None:
    for message in run_ranks(skip_one, 2, num_samples, accumulate):
        assert "rank 0: samples 4 … of epoch 0\n  rank 1: samples 8 … of epoch 0\n" in message
        assert "One of them has left out a backward pass" in message


def lose_tags_now_and_then() -> bool:
    """Whether ranks agree although each computes new inputs from some of its batches, others on each."""
    model, loader = make(16)
    for number, (inputs,) in enumerate(loader):
        backward(model, inputs * 1.0 if (number + dist.get_rank()) % 2 else inputs)
    weight = model.module.weight.grad.clone()
    dist.all_reduce(weight)
    return torch.equal(weight / dist.get_world_size(), model.module.weight.grad)


def test_a_batch_without_its_tag_is_not_compared() -> None:
    assert run_ranks(lose_tags_now_and_then, 2) == [True, True]


def test_stamps() -> None:
    first, second = "samples 0 to 3 of epoch 1", "samples 4 to 7 of epoch 1"
    assert stamp_of([first, second]) == stamp_of([second, first])
    assert len({stamp_of([first, second]), stamp_of([first]), stamp_of([second]), 0}) == 4
    assert stamp_of([first, ""]) == stamp_of([]) == 0
    assert max(stamp_of([f"samples {2**40} to {2**41} of epoch {2**20}"]), stamp_of([first])) < 2**63
    check_stamps([stamp_of([first]), 0, stamp_of([first])])
