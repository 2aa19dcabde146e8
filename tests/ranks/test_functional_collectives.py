"""Collectives that autograd goes through: torch's functional ones, and those of torch.distributed.nn."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn as differentiable

from lockstep.testing import run_ranks

ROUNDS = 30


def name_of(*names: str) -> Any:
    """The first of these functions that this torch has: it renames them."""
    return next(getattr(functional, name) for name in names if hasattr(functional, name))


def differentiate_functional() -> None:
    """An output gets its grad_fn while the group's thread writes it, sooner or later in that call."""
    warnings.simplefilter("ignore", FutureWarning)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    gather = name_of("all_gather_single_autograd", "all_gather_tensor_autograd")
    scatter = name_of("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd")
    for _ in range(ROUNDS):
        inputs = torch.arange(4.0 * world_size, requires_grad=True)
        exchanged = functional.all_to_all_single_autograd(inputs, None, None, group)
        scattered = scatter(inputs, "sum", 0, group)
        gathered = gather(inputs, 0, group)
        assert exchanged.tolist() == [4.0 * rank + place for _ in range(world_size) for place in range(4)]
        assert scattered.tolist() == [world_size * (4.0 * rank + place) for place in range(4)]
        assert gathered.tolist() == inputs.tolist() * world_size
        (exchanged.sum() + 2.0 * scattered.sum() + 3.0 * gathered.sum()).backward()
        assert inputs.grad is not None
        assert inputs.grad.tolist() == [1.0 + 2.0 + 3.0 * world_size] * inputs.numel()


def differentiate_nn() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    world_size = dist.get_world_size()
    for _ in range(ROUNDS):
        inputs = torch.arange(4.0, requires_grad=True)
        total = differentiable.all_reduce(inputs)  # type: ignore[attr-defined]
        everybody = torch.cat(differentiable.all_gather(inputs))  # type: ignore[attr-defined]
        (total.sum() + everybody.sum()).backward()
        assert inputs.grad is not None
        assert inputs.grad.tolist() == [2.0 * world_size] * 4


@pytest.mark.parametrize("program", [differentiate_functional, differentiate_nn])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_are_differentiated(world_size: int, program: Any) -> None:
    run_ranks(program, world_size)
