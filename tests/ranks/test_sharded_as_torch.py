"""What scripts do with torch's ZeroRedundancyOptimizer, over our group: with torch's class, and with ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

import lockstep
from ddp_checks import error_of
from lockstep.errors import CheckpointError, InputError, ModelError
from lockstep.testing import run_ranks
from test_sharded import backends, backward, distance, net, pair


def follow_the_recipe(class_of: str, engine_of: str, as_view: bool) -> tuple[float, int]:
    """The tutorial's: how far from plain Adam, and for how many parameters rank 0 has the state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs  # warns of torch's own deprecations

    kinds: dict[str, Any] = {"ours": lockstep.ZeroRedundancyOptimizer, "torch's": Torchs}
    engines: dict[str, Any] = {"ours": lockstep.DistributedDataParallel, "torch's": nn.parallel.DistributedDataParallel}
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(200, 200) for _ in range(5)]).double()
    twin = copy.deepcopy(model)
    ddp_model, ddp_twin = engines[engine_of](model), engines[engine_of](twin)
    optimizer = kinds[class_of](
        ddp_model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01, parameters_as_bucket_view=as_view
    )
    reference = torch.optim.Adam(ddp_twin.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        inputs = torch.randn(20, 200, generator=generator, dtype=torch.float64)
        labels = torch.randn(20, 200, generator=generator, dtype=torch.float64)
        for module, each in ((ddp_model, optimizer), (ddp_twin, reference)):
            each.zero_grad()
            nn.MSELoss()(module(inputs), labels).backward()
            each.step()
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        state = optimizer.state_dict()
        reference.load_state_dict(state)
        return distance(model, twin), len(state["state"])
    with pytest.raises((CheckpointError, RuntimeError)):  # ours, torch's
        optimizer.state_dict()
    return distance(model, twin), 10


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("engine_of", ["ours", "torch's"])
@pytest.mark.parametrize("class_of", ["ours", "torch's"])
def test_the_recipe_of_torchs_tutorial(class_of: str, engine_of: str, as_view: bool) -> None:
    for far, count in run_ranks(follow_the_recipe, 2, class_of, engine_of, as_view):
        assert far <= 1e-12
        assert count == 10


def ask_for_what_is_refused() -> list[str]:
    model = lockstep.DistributedDataParallel(net())
    kind: Any = lockstep.ZeroRedundancyOptimizer
    found = [error_of(kind, model.parameters(), torch.optim.Adam, overlap_with_ddp=True)]
    assert isinstance(found[0], InputError)
    optimizer = kind(model.parameters(), torch.optim.Adam, lr=0.01)
    for enter in (model.join, lambda: Join([model, optimizer]), lambda: Join([optimizer])):
        error = error_of(enter)
        assert isinstance(error, ModelError)
        found.append(error)
    backward(model, 0)
    optimizer.step()  # nothing is lost
    return [str(error) for error in found]


def test_what_is_refused() -> None:
    for overlap, *joins in run_ranks(ask_for_what_is_refused, 2):
        assert overlap.startswith("overlap_with_ddp=True would step the optimizer in a communication hook")
        for each in joins:
            assert each.startswith("Join: a rank that has joined would still have to step its share")
            assert "lockstep.DataLoader" in each


def load_by_distributed_checkpoint() -> float:
    """Into an optimizer that has taken no step; torch's functions make it take one, by gradients of their own."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    sharded, optimizer, plain, plain_optimizer = pair("adam")
    for model, each in ((sharded, optimizer), (plain, plain_optimizer)):
        backward(model, 0)
        each.step()
    state = copy.deepcopy(get_optimizer_state_dict(sharded, optimizer))
    again = lockstep.DistributedDataParallel(copy.deepcopy(sharded.module))
    fresh = lockstep.ZeroRedundancyOptimizer(again.parameters(), torch.optim.Adam, lr=0.01)
    set_optimizer_state_dict(again, fresh, state)
    for model, each in ((again, fresh), (plain, plain_optimizer)):
        each.zero_grad()
        backward(model, 1)
        each.step()
    return distance(again, plain)


@backends
def test_distributed_checkpoint(backend: str) -> None:
    assert max(run_ranks(load_by_distributed_checkpoint, 2, backend=backend)) <= 1e-12


def go_back() -> tuple[float, bool]:
    """To a plain optimizer, in the middle of a training."""
    sharded, optimizer, plain, plain_optimizer = pair("adam")
    for seed in range(2):
        for model, each in ((sharded, optimizer), (plain, plain_optimizer)):
            each.zero_grad()
            backward(model, seed)
            each.step()
    state = optimizer.state_dict()
    model = lockstep.DistributedDataParallel(copy.deepcopy(sharded.module))
    back = torch.optim.Adam(model.parameters())
    back.load_state_dict(state)
    before = [each.detach().clone() for each in sharded.parameters()]
    for seed in range(2, 4):
        for one, other in ((model, back), (plain, plain_optimizer)):
            other.zero_grad()
            backward(one, seed)
            other.step()
    is_apart = all(torch.equal(a, b) for a, b in zip(before, sharded.parameters(), strict=True))
    return distance(model, plain), is_apart


def test_the_way_back_to_a_plain_optimizer() -> None:
    for far, is_apart in run_ranks(go_back, 2):
        assert far <= 1e-12
        assert is_apart
