"""Trainings one after the other in one process are one program each: what was there before changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import lockstep
from lockstep.testing import run_ranks

_kept: list[Any] = []


def train(batch_size: int, copies: int) -> list[float]:
    """A training whose inputs have lost their tags: `copies` of each sample, collated again."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(28, 3, generator=generator, dtype=torch.float64))
    loader = lockstep.DataLoader(data, batch_size, drop_last=True)
    model = lockstep.DistributedDataParallel(nn.Linear(3, 1, dtype=torch.float64))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in loader:
        optimizer.zero_grad()
        again = torch.stack([*x] * copies)
        mse_loss(model(again), again[:, :1]).backward()
        optimizer.step()
    _kept.extend([loader, x])  # as a notebook keeps what it has made
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def alone_and_after(other: int) -> tuple[list[float], list[float]]:
    _kept.clear()
    alone = train(4, copies=2)
    train(other, copies=1)
    after = train(4, copies=2)
    _kept.clear()
    return alone, after


@pytest.mark.parametrize("other", [7, 9])
def test_another_training_before_changes_nothing(other: int) -> None:
    """Its batches of 4 rows on the first rank are no part of the next program, whose inputs have 4 rows."""
    for alone, after in run_ranks(alone_and_after, 2, other):
        assert alone == after
