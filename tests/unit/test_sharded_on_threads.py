"""A sharded optimizer whose gradients go out as on GPUs, by reduce_scatter, on ranks that are threads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep import DistributedDataParallel, ZeroRedundancyOptimizer
from lockstep.parallel import transports
from lockstep.parallel.sharded import optimizer as sharded_optimizer
from lockstep.parallel.sharded.gradients import ShardedGradient
from thread_team import run_threads


def make_model() -> nn.Module:
    """The same in each thread: all of them draw from one generator."""
    model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 500), nn.Tanh(), nn.Linear(500, 7)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator).mul_(0.1)
    return model


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(5, 6, generator=generator, dtype=torch.float64)).square().mean().backward()


def train(rank: int) -> tuple[float, bool]:
    """How far from the plain optimizer, and whether gradients are in shares."""
    models = [DistributedDataParallel(make_model()) for _ in range(2)]
    optimizers = [
        ZeroRedundancyOptimizer(models[0].parameters(), torch.optim.Adam, lr=1e-3),
        torch.optim.Adam(models[1].parameters(), lr=1e-3),
    ]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for each in range(1 + step % 2):  # averaged twice: the means add up
                backward(model, 100 * step + 10 * each + rank)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    far = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return far, all(isinstance(each.grad, ShardedGradient) for each in models[0].parameters())


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("way", ["reduce_scatter", None])
def test_gradients_reach_their_owners(way: str | None, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: what such a group does by itself, which averages gradients whole."""
    if way is not None:
        for module in (transports, sharded_optimizer):
            monkeypatch.setattr(module, "find_way", lambda group, device: way)
    for result in run_threads(train, world_size):
        assert not isinstance(result, Exception), result
        far, are_sharded = result
        assert far <= 1e-14
        assert are_sharded is (way is not None)
