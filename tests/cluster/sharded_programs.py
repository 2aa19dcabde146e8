"""What ranks on test hosts do with a sharded optimizer, for `test_hosts_sharded.py`. Each runs on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from hosts_programs import raised_by, world
from lockstep.parallel.sharded.optimizer import ZeroRedundancyOptimizer
from lockstep.recipes.imagenet import strategies

_STEPS = 5


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 700), torch.nn.Tanh(), torch.nn.Linear(700, 50))


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + rank)
    optimizer.zero_grad()
    model(torch.randn(4, 40, generator=generator)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def _values(tensors: Any) -> list[Any]:
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in tensors]


def _held(optimizer: ZeroRedundancyOptimizer) -> float:
    """The part of the state that this rank has."""
    state = [each for group in optimizer.optim.state.values() for each in group.values() if each.dim()]
    whole = sum(each.numel() for group in optimizer.param_groups for each in group["params"])
    return sum(each.numel() for each in state) / (2 * whole)


def train(**options: Any) -> dict[str, Any]:
    """A training by AdamW, sharded and not: parameters and state of both, and how much of the state this rank has.

    Args:
        **options: of `lockstep.init`.
    """
    with world(**options) as opened:
        dist.new_group([0])  # ranks have different numbers of groups, of which torch makes names
        found: dict[str, Any] = {}
        for kind in ("plain", "sharded"):
            model = lockstep.DistributedDataParallel(_network())
            optimizer: torch.optim.Optimizer = (
                torch.optim.AdamW(model.parameters(), lr=0.01)
                if kind == "plain"
                else ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
            )
            for number in range(_STEPS):
                _step(model, optimizer, opened.rank, number)
            state = optimizer.state_dict()["state"]
            parameters = _values(model.parameters())
            if isinstance(optimizer, ZeroRedundancyOptimizer):
                found["held"] = _held(optimizer)
            found[kind] = parameters, {key: _values(state[key].values()) for key in sorted(state)}
        return found


def share() -> dict[str, Any]:
    """What the two ranks of a host have once, and say when one writes there; how much of the state each has."""
    with world() as opened:
        is_first = opened.local_rank == 0
        model = lockstep.DistributedDataParallel(_network())
        first = next(model.parameters())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        _step(model, optimizer, opened.rank, 0)
        with optimizer.changing_parameters():
            first.data.view(-1)[0] = 3.0 if is_first else 7.0
        seen = first.data.view(-1)[0].item()
        weights = {name: each + 1.0 for name, each in copy.deepcopy(model.module).state_dict().items()}
        model.module.load_state_dict(weights)
        _step(model, optimizer, opened.rank, 1)
        dist.barrier()
        if is_first:
            first.data.add_(1.0)
        dist.barrier()
        return {
            "held": _held(optimizer),
            "seen": seen,
            "raised": raised_by(lambda: _step(model, optimizer, opened.rank, 2))[:2],
        }


def consolidate(to: int) -> list[Any]:
    """The kinds of what ranks get when the state goes to one of them."""
    with world() as opened:
        model = lockstep.DistributedDataParallel(_network())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        _step(model, optimizer, opened.rank, 0)
        optimizer.consolidate_state_dict(to=to)
        if opened.rank == to:
            return sorted(optimizer.state_dict()["state"])
        return [raised_by(optimizer.state_dict)[0]]


def resume(state: dict[str, Any] | None) -> dict[str, Any]:
    """All that a training is after some steps, from the beginning or from such a state. All ranks have one batch."""
    with world():
        model = lockstep.DistributedDataParallel(_network())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        if state is not None:
            model.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for number in range(_STEPS):
            _step(model, optimizer, 0, number)
        return {"model": copy.deepcopy(model.module).state_dict(), "optimizer": optimizer.state_dict()}


def recipe() -> list[bool]:
    """Whether the image recipe shares out the steps of a large network, and of a small one."""
    with world() as opened:
        found = []
        for width in (1000, 10):
            module = torch.nn.Linear(width, width)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            made = strategies.prepare("ddp", module, optimizer, opened, precision="fp32", shards=None).optimizer
            found.append(isinstance(made, ZeroRedundancyOptimizer))
        return found
