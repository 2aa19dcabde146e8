"""Calls that are over before torch's C++ comes to wait for them."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.work import PendingWork, Runner
from lockstep.testing import run_ranks


def submit_and_finish(runner: Runner, work: PendingWork) -> None:
    """Hand a call to the group's thread, and come back when it is over."""
    submit(runner, work)
    work._finished.wait()


submit = Runner.submit


def train_with_torch() -> list[float]:
    """Wraps a module whose parameters travel in large broadcasts in torch's engine, and trains it for three steps."""
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 2))
    module.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # broadcast on its own, behind them
    with mock.patch.object(Runner, "submit", submit_and_finish):
        model = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.1, find_unused_parameters=True)
        for _ in range(3):
            model(torch.ones(2, 400) * (1 + dist.get_rank())).square().sum().backward()
    return [parameter.grad.sum().item() for parameter in module.parameters() if parameter.grad is not None]


def test_torch_waits_for_calls_that_are_over() -> None:
    """C++ of torch 2.6 lets go of what we return: somebody has to keep it, whether the call is over or not."""
    first, second = run_ranks(train_with_torch, 2)
    assert first == second
    assert len(first) == 4
