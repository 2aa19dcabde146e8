"""`lockstep.init(seed=…)`: the same weights on all ranks, other dropout masks on each."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.data import seeding as data_seeding
from lockstep.errors import InputError, InputTypeError
from lockstep.seeding import check_seed, derive_seed
from lockstep.testing import run_ranks

Draws = tuple[list[float], list[float], float, float]


def draw() -> Draws:
    """A dropout mask, and a number from each of the process-wide generators."""
    mask = nn.functional.dropout(torch.ones(64)).tolist()
    return mask, torch.rand(2).tolist(), float(np.random.rand()), random.random()


def train_a_little(seed: int | None, wraps: bool = True) -> tuple[list[float], Draws]:
    """Initial weights, and what is drawn after the wrapped model's first forward pass."""
    with lockstep.init(seed=seed):
        net = nn.Linear(3, 2)
        weights = [value for parameter in net.parameters() for value in parameter.flatten().tolist()]
        if wraps:
            lockstep.DistributedDataParallel(net)(torch.ones(1, 3))
        return weights, draw()


def unlike(draws: Draws, others: Draws) -> bool:
    return all(here != there for here, there in zip(draws, others, strict=True))


@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_are_alike_and_masks_differ(world_size: int) -> None:
    ((weights, draws),) = run_ranks(train_a_little, 1, 7, init=False)
    found = run_ranks(train_a_little, world_size, 7, init=False)
    assert [each for each, _ in found] == [weights] * world_size
    assert found[0][1] == draws, "rank 0 draws what one process does"
    for rank, (_, own) in enumerate(found):
        assert all(unlike(own, other) for _, other in found[:rank])
    assert run_ranks(train_a_little, world_size, 7, init=False) == found


def test_another_seed_draws_something_else() -> None:
    first, second = (run_ranks(train_a_little, 2, seed, init=False) for seed in (7, 8))
    for (weights, draws), (other_weights, other_draws) in zip(first, second, strict=True):
        assert weights != other_weights
        assert unlike(draws, other_draws)


def test_one_process_draws_as_after_seeding_by_hand() -> None:
    ((weights, draws),) = run_ranks(train_a_little, 1, 7, init=False)
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    expected = [value for parameter in nn.Linear(3, 2).parameters() for value in parameter.flatten().tolist()]
    assert weights == expected
    assert draws == draw()


def test_without_a_model_and_without_a_seed_nothing_changes() -> None:
    alike = run_ranks(train_a_little, 2, 7, wraps=False, init=False)
    assert alike[0] == alike[1]
    unseeded = run_ranks(train_a_little, 2, None, init=False)  # Workers begin every job with the same seeds.
    assert unseeded[0] == unseeded[1]


def wrap_twice() -> bool:
    with lockstep.init(seed=7):
        lockstep.DistributedDataParallel(nn.Linear(1, 1))
        torch.manual_seed(5)
        lockstep.DistributedDataParallel(nn.Linear(1, 1))
        after = torch.rand(1).item()
        torch.manual_seed(5)
        nn.Linear(1, 1)
        return after == torch.rand(1).item()


def make_models_late(looks: bool) -> tuple[list[float], list[float], list[float]]:
    """A model that nobody wraps, made behind the first engine; and the masks of the first two training passes.

    Args:
        looks: a pass without gradients comes first, and what it draws is undone.
    """
    with lockstep.init(seed=7):
        engine = lockstep.DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.Dropout()))
        target = nn.Linear(3, 2)
        if looks:
            with torch.no_grad(), torch.random.fork_rng():
                engine(torch.ones(20, 3))
        masks = [(engine(torch.ones(20, 3)) == 0).float().flatten().tolist() for _ in range(2)]
        return target.weight.flatten().tolist(), masks[0], masks[1]


@pytest.mark.parametrize("looks", [False, True])
def test_models_made_behind_the_first_engine_are_alike(looks: bool) -> None:
    ((target, *masks),) = run_ranks(make_models_late, 1, looks, init=False)
    found = run_ranks(make_models_late, 3, looks, init=False)
    assert [each for each, *_ in found] == [target] * 3
    assert found[0] == (target, *masks), "rank 0 draws what one process does"
    for rank, (_, *own) in enumerate(found):
        for _, *other in found[:rank]:
            assert all(here != there for here, there in zip(own, other, strict=True)), "from the first pass on"


def act_at_first() -> float:
    with lockstep.init(seed=7):
        actor = lockstep.DistributedDataParallel(nn.Linear(3, 2))
        with torch.no_grad():
            actor(torch.ones(1, 3))
        return torch.rand(1).item()


def test_actors_draw_their_own_actions() -> None:
    first, second = run_ranks(act_at_first, 2, init=False)
    assert first != second


def restore(kind: str) -> bool:
    """A script that resumes has made its engine when it takes back the state of its generators."""
    with lockstep.init(seed=7):
        engine = lockstep.DistributedDataParallel(nn.Linear(3, 2))
        if kind == "seed":
            torch.manual_seed(5)
        else:
            torch.set_rng_state(torch.Generator().manual_seed(5).get_state())
        engine(torch.ones(1, 3))
        return torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(5)).item()


@pytest.mark.parametrize("kind", ["seed", "state"])
def test_what_the_script_has_seeded_or_restored_stays(kind: str) -> None:
    assert run_ranks(restore, 2, kind, init=False) == [True, True]


def test_only_the_first_model_moves_the_streams() -> None:
    assert run_ranks(wrap_twice, 2, init=False) == [True, True]


def wrap_in_another_world() -> bool:
    lockstep.init(seed=7).shutdown()
    with lockstep.init():
        torch.manual_seed(5)
        net = nn.Linear(1, 1)
        lockstep.DistributedDataParallel(net)
        after = torch.rand(1).item()
        torch.manual_seed(5)
        nn.Linear(1, 1)
        return after == torch.rand(1).item()


def test_a_seed_belongs_to_its_world() -> None:
    assert run_ranks(wrap_in_another_world, 2, init=False) == [True, True]


def adopt() -> float:
    lockstep.init(seed=7)
    return torch.rand(1).item()


def test_a_group_that_is_there_already_is_seeded_too() -> None:
    first, second = run_ranks(adopt, 2)
    assert first == second == torch.rand(1, generator=torch.Generator().manual_seed(7)).item()


@pytest.mark.parametrize(
    ("seed", "error", "text"),
    [
        (1.0, InputTypeError, "seed is 1.0 (float); expected an integer"),
        (True, InputTypeError, "seed is True (bool); expected an integer"),
        ("7", InputTypeError, "seed is '7' (str); expected an integer"),
        (2**64, InputError, "expected -2**63 to 2**64-1"),
        (-(2**63) - 1, InputError, "expected -2**63 to 2**64-1"),
    ],
)
def test_seeds_that_cannot_be(seed: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        lockstep.init(seed=seed, device="cpu")
    assert text in str(caught.value)
    assert not dist.is_initialized()


@pytest.mark.parametrize("seed", [0, np.int64(3), -(2**63), 2**64 - 1])
def test_seeds_that_torch_takes(seed: Any) -> None:
    assert check_seed(seed) == int(seed)
    with lockstep.init(seed=seed, device="cpu"):
        pass


def test_the_loaders_seeds_are_those_of_before() -> None:
    assert data_seeding.derive_seed is derive_seed
    assert derive_seed(b"sample", 1, 2, 3) == 8829882195302039915
