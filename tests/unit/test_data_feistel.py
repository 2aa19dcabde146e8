"""Orders that are computed, and orders that take less memory."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loader_cases import Numbers, run_ranks_in_turn
from lockstep.data import DataLoader, loader
from lockstep.data.feistel import ComputedOrder
from lockstep.data.order import computed_order, shuffled_order
from lockstep.data.seeding import make_generator
from lockstep.errors import DataError

LARGE = 70_001  # samples: more than are stored anyway


@pytest.mark.parametrize("num_samples", [*range(1, 70), 4095, 4096, 4097, 10_007, 2**16, 99_999])
def test_each_sample_has_one_place(num_samples: int) -> None:
    order = ComputedOrder(num_samples, 0, 0)
    assert len(order) == num_samples
    assert np.array_equal(np.sort(order[:]), np.arange(num_samples))
    assert order[:].dtype == np.int64


@given(num_samples=st.integers(1, 20_000), begin=st.integers(0, 20_000), length=st.integers(0, 9000))
def test_a_part_is_a_part_of_the_whole(num_samples: int, begin: int, length: int) -> None:
    """Wherever an epoch is entered, and whatever was asked for before."""
    part = ComputedOrder(num_samples, 1, 2)[begin : begin + length]
    assert np.array_equal(part, ComputedOrder(num_samples, 1, 2)[:][begin : begin + length])


def chi_square(counts: np.ndarray) -> float:
    """Of equally likely cells, in standard deviations from its mean."""
    mean = counts.mean()
    degrees = counts.size - 1
    return float((((counts - mean) ** 2 / mean).sum() - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize("num_samples", [2, 5, 8, 13])
def test_every_sample_comes_to_every_place_equally_often(num_samples: int) -> None:
    """And so do pairs of neighbours; the numbers are the same in every run."""
    orders = np.stack([ComputedOrder(num_samples, 3, epoch)[:] for epoch in range(700)])
    places = np.stack([np.bincount(column, minlength=num_samples) for column in orders.T])
    assert abs(chi_square(places)) < 4
    pairs = np.bincount(orders[:, 0] * num_samples + orders[:, 1], minlength=num_samples**2)
    different = pairs.reshape(num_samples, num_samples)[~np.eye(num_samples, dtype=bool)]
    assert abs(chi_square(different)) < 4


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first = ComputedOrder(LARGE, 0, 0)[:]
    assert np.array_equal(first, ComputedOrder(LARGE, 0, 0)[:])
    for other in (ComputedOrder(LARGE, 0, 1)[:], ComputedOrder(LARGE, 1, 0)[:], np.arange(LARGE)):
        assert (first == other).sum() < 12  # of a Poisson distribution around 1
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.02
        assert (np.diff(first) == np.diff(other)).sum() < 12
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.02


def test_it_is_the_same_in_every_release() -> None:
    assert ComputedOrder(10**12, 1, 2)[10**11 : 10**11 + 3].tolist() == [339932480995, 341199451519, 723392457377]


def test_little_is_stored_for_any_length() -> None:
    order = ComputedOrder(10**15, 0, 0)
    assert len(set(order[10**14 : 10**14 + 100].tolist())) == 100


def test_few_samples_are_stored_anyway() -> None:
    assert np.array_equal(computed_order(2**16, 1, 2), shuffled_order(2**16, 1, 2))  # type: ignore[arg-type]
    assert isinstance(computed_order(2**16 + 1, 1, 2), ComputedOrder)


def test_the_stored_order_is_that_of_every_release_in_half_the_memory() -> None:
    for length in (1, 7, 1000, 100_000):
        order = shuffled_order(length, 1, 2)
        assert order.dtype == np.int32
        wide = torch.randperm(length, generator=make_generator(b"shuffle", 1, 2))
        assert order.tolist() == wide.tolist()


def test_a_loader_of_it_at_any_number_of_ranks() -> None:
    def samples(world_size: int, **options: Any) -> list[Any]:
        batches = run_ranks_in_turn(
            list(range(LARGE)), world_size, batch_size=20_000, shuffle=True, seed_global_rng=False, **options
        )
        return [sample for batch in batches for sample in batch]

    whole = samples(1, permutation="computed")
    assert sorted(whole) == list(range(LARGE))
    assert samples(3, permutation="computed") == whole == ComputedOrder(LARGE, 0, 0)[:].tolist()
    half = DataLoader(list(range(LARGE)), 20_000, shuffle=True, permutation="computed", seed_global_rng=False)
    batches = iter(half)
    next(batches)
    state = half.state_dict()
    assert samples(2, permutation="computed", state=state) == whole[20_000:]
    with pytest.raises(DataError, match=r"its order is 'shuffled, computed', here it is 'shuffled'"):
        DataLoader(list(range(LARGE)), 20_000, shuffle=True).load_state_dict(state)
    older = {**state, "order": "shuffled"}
    with pytest.raises(DataError, match=r"its order is 'shuffled', here it is 'shuffled, computed'"):
        half.load_state_dict(older)


def test_options_that_are_none() -> None:
    with pytest.raises(DataError, match="permutation is 'feistel'; expected 'stored' or 'computed'"):
        DataLoader(Numbers(3), 1, shuffle=True, permutation="feistel")
    with pytest.raises(DataError, match=r"shuffle is False\. Pass shuffle=True"):
        DataLoader(Numbers(3), 1, permutation="computed")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_orders_of_two_epochs_are_not_there_at_once(monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    orders: list[weakref.ref[Any]] = []

    def watched(length: int, seed: int, epoch: int) -> Any:
        alive = [each for each in orders if each() is not None]
        assert len(alive) == still_walked
        order = shuffled_order(length, seed, epoch)
        orders.append(weakref.ref(order))
        return order

    monkeypatch.setattr(loader, "shuffled_order", watched)
    options = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    epochs = DataLoader(Numbers(8), 4, shuffle=True, **options)
    still_walked = 0
    for _ in range(3):
        for _ in epochs:
            pass
    if num_workers == 0:  # else a new iteration ends the one before it
        walking = iter(epochs)
        still_walked = 1
        assert len(list(epochs)) == len(list(walking)) == 2
