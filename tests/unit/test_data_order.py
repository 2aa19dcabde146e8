"""The pure half of the loader: which samples, in which order, on which rank."""

from __future__ import annotations

import contextlib
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.batch.share import share_bounds
from lockstep.data.order import OrderedBatches, Plan, RankBatches, draw_order, shuffled_order
from lockstep.data.seeding import derive_seed, make_generator, preserve_global_rngs, seed_global_rngs
from lockstep.errors import DataError

sizes = st.integers(1, 60)
worlds = st.integers(1, 9)

unhurried = settings(deadline=None)  # of one example; a busy machine is no failure


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def batches_of(plan: Plan, rank: int, world_size: int, order: np.ndarray | range, evaluation: bool = False):
    """Per batch of one rank: what is fetched, and the share that is taken with it."""
    batches = RankBatches(
        *(OrderedBatches(order, plan), plan.sizes(), plan.batch_size, 0, 0, rank, world_size),
        evaluation=evaluation,
    )
    fetches = list(batches)
    assert len(fetches) == len(batches)
    return [(fetch, batches.take(number)[0]) for number, fetch in enumerate(fetches)]


def indices_of(plan: Plan, rank: int, world_size: int, order: np.ndarray | range, evaluation: bool = False):
    """Per batch of one rank: the indices that count (a filler's do not)."""
    batches = batches_of(plan, rank, world_size, order, evaluation)
    return [fetch.indices[: share.local_samples] for fetch, share in batches]


@unhurried
@given(num_samples=st.integers(0, 200), world_size=worlds)
def test_shares_are_contiguous_and_even(num_samples, world_size):
    bounds = [share_bounds(num_samples, rank, world_size) for rank in range(world_size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_samples
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(bounds))
    lengths = [end - begin for begin, end in bounds]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@unhurried
@given(num_samples=sizes, batch_size=sizes, world_size=worlds, drop_last=st.booleans(), seed=st.integers(0, 3))
def test_ranks_side_by_side_are_the_order(num_samples, batch_size, world_size, drop_last, seed):
    order = shuffled_order(num_samples, seed, 0)
    plan = Plan(num_samples, batch_size, drop_last)
    ranks = [indices_of(plan, rank, world_size, order) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {len(plan)}, "every rank takes part in every step"
    batches = [flat(shares) for shares in zip(*ranks, strict=True)]
    kept = num_samples - num_samples % batch_size if drop_last else num_samples
    assert flat(batches) == order[:kept].tolist()
    assert all(len(batch) == batch_size for batch in batches[:-1])


@unhurried
@given(num_samples=sizes, batch_size=sizes, world_size=worlds)
def test_evaluation_gives_no_fillers_and_loses_nothing(num_samples, batch_size, world_size):
    plan = Plan(num_samples, batch_size)
    shares = []
    for rank in range(world_size):
        for fetch, share in batches_of(plan, rank, world_size, range(num_samples), evaluation=True):
            assert len(fetch.indices) == share.local_samples > 0
            shares.append(fetch.indices)
    assert sorted(flat(shares)) == list(range(num_samples))


@unhurried
@given(num_samples=sizes, batch_size=sizes, world_size=worlds)
def test_training_fills_empty_shares_with_the_first_sample(num_samples, batch_size, world_size):
    plan = Plan(num_samples, batch_size)
    for rank in range(world_size):
        begin, end = share_bounds(batch_size, rank, world_size)
        rows = 2 if end - begin == 1 else 1  # never as many as of a full batch
        for number, (fetch, share) in enumerate(batches_of(plan, rank, world_size, range(num_samples))):
            assert share.rows == len(fetch.indices)
            if share.local_samples == 0:
                assert fetch.indices == [plan.bounds(number)[0]] * rows


@unhurried
@given(data=st.data(), num_samples=sizes, first=sizes, second=sizes, before=worlds, after=worlds)
def test_resumed_epoch_goes_on_after_the_samples_consumed(data, num_samples, first, second, before, after):
    """k batches at one world and batch size, the rest at others: the order, once."""
    order = shuffled_order(num_samples, 1, 5)
    plan = Plan(num_samples, first)
    yielded = data.draw(st.integers(0, len(plan)))
    consumed = plan.bounds(yielded - 1)[1] if yielded else 0
    head = [indices_of(plan, rank, before, order)[:yielded] for rank in range(before)]
    rest = Plan(num_samples, second, start=consumed)
    tail = [indices_of(rest, rank, after, order) for rank in range(after)]
    together = [*zip(*head, strict=True), *zip(*tail, strict=True)]
    assert flat(flat(together)) == order.tolist()


@unhurried
@given(num_samples=sizes, batch_size=sizes, drop_last=st.booleans(), data=st.data())
def test_resuming_with_the_same_batch_size_gives_the_same_batches(num_samples, batch_size, drop_last, data):
    plan = Plan(num_samples, batch_size, drop_last)
    yielded = data.draw(st.integers(0, len(plan)))
    rest = Plan(num_samples, batch_size, drop_last, start=min(yielded * batch_size, num_samples))
    assert [rest.bounds(k) for k in range(len(rest))] == [plan.bounds(k) for k in range(yielded, len(plan))]


@unhurried
@given(num_samples=sizes, batch_size=sizes, world_size=worlds)
def test_weights_average_to_one(num_samples, batch_size, world_size):
    """The mean weight over ranks is 1, which keeps the scale of a gradient averaged over ranks."""
    plan = Plan(num_samples, batch_size)
    ranks = [batches_of(plan, rank, world_size, range(num_samples)) for rank in range(world_size)]
    for number in range(len(plan)):
        shares = [batches[number][1] for batches in ranks]
        assert sum(share.local_samples for share in shares) == shares[0].global_samples
        assert sum(share.weight for share in shares) == pytest.approx(world_size, rel=1e-14)


def test_shuffles_are_permutations_of_their_own():
    first = shuffled_order(1000, 0, 0)
    assert sorted(first.tolist()) == list(range(1000))
    assert first.dtype == np.int32
    assert (first == shuffled_order(1000, 0, 0)).all()
    for other in (shuffled_order(1000, 0, 1), shuffled_order(1000, 1, 0)):
        assert (first == other).mean() < 0.02  # a random permutation keeps 1 place in 1000


def test_seeds_differ_in_every_argument():
    seen = {
        derive_seed(purpose, seed, epoch, index)
        for purpose in (b"sample", b"shuffle")
        for seed in (0, 1, -1, 2**63)
        for epoch in range(10)
        for index in range(50)
    }
    assert len(seen) == 2 * 4 * 10 * 50
    assert all(0 <= value < 2**64 for value in seen)


def test_seed_is_the_same_in_every_release():
    # Changing it changes every run that anybody wants to repeat.
    assert derive_seed(b"sample", 1, 2, 3) == 0x7A8A0B12EB86416B
    assert make_generator(b"sample", 1, 2, 3).initial_seed() == derive_seed(b"sample", 1, 2, 3)


def draw_globally() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_seeding_starts_all_global_generators_anew():
    with preserve_global_rngs():
        seed_global_rngs(derive_seed(b"sample", 0, 0, 1))
        first = draw_globally()
        seed_global_rngs(derive_seed(b"sample", 0, 0, 2))
        other = draw_globally()
        seed_global_rngs(derive_seed(b"sample", 0, 0, 1))
        assert draw_globally() == first
    assert not set(first) & set(other)


def test_global_generators_are_put_back():
    seed_global_rngs(3)
    expected = draw_globally()
    seed_global_rngs(3)
    with preserve_global_rngs():
        seed_global_rngs(5)
        draw_globally()
    with contextlib.suppress(KeyError), preserve_global_rngs():
        with preserve_global_rngs():
            draw_globally()
            seed_global_rngs(6)
        seed_global_rngs(7)
        raise KeyError
    assert draw_globally() == expected


def test_torch_and_numpy_do_not_share_a_stream():
    """Both are Mersenne Twisters; with equal seeds the second would repeat the first."""
    with preserve_global_rngs():
        seed_global_rngs(derive_seed(b"sample", 0, 0, 0))
        ours = torch.randint(0, 2**31, (8,)).tolist()
        others = np.random.randint(0, 2**31, 8).tolist()
    assert not set(ours) & set(others)


class NotIndices:
    def __init__(self, items, length):
        self.items, self.length = items, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.items)


class Endless:
    """Fails where it is walked far behind its length, which nothing else would end."""

    def __iter__(self):
        yield from range(100)
        raise AssertionError("walked on and on")


class Grows(NotIndices):
    """Learns how many there are while it is walked."""

    def __iter__(self):
        for index in self.items:
            self.length = max(self.length, index + 1)
            yield index
        self.length = len(self.items)


@pytest.mark.parametrize(
    ("items", "length", "expected"),
    [
        ([0, 1, 2], 4, "yielded 3 indices in epoch 6, but its length is 4"),
        ([0, 1, 2], 2, "yielded more indices in epoch 6, but its length is 2.*Fix its __len__"),
        # As samplers for loops without epochs, which have a length all the same.
        (Endless(), 8, "yielded more indices.*, but its length is 8.*endless, .*drop it and pass shuffle=True"),
        ([0.5, 1], 2, "not an index"),
        ([[0, 1], [2]], 2, "batch_sampler"),
        (["a"], 1, "not an index"),
        ([2**70], 1, "not an index"),
    ],
)
def test_sampler_that_yields_no_order(items, length, expected):
    with pytest.raises(DataError, match=expected):
        draw_order(NotIndices(items, length), 0, 6)


def test_sampler_draws_from_seed_and_epoch():
    sampler = torch.utils.data.RandomSampler(range(50))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = draw_order(sampler, 3, 0)
    assert torch.equal(torch.get_rng_state(), state), "the caller's stream is put back"
    torch.manual_seed(1)
    assert (draw_order(sampler, 3, 0) == first).all(), "whatever the rank's own stream is"
    assert (draw_order(sampler, 3, 1) != first).any()
    assert (draw_order(sampler, 4, 0) != first).any()


def test_sampler_may_yield_tensors_and_numpy_integers():
    assert draw_order(NotIndices([torch.tensor(3), np.int32(1), 2], 3), 0, 0).tolist() == [3, 1, 2]


@pytest.mark.parametrize("length", [0, 1, 3, 4, 9])
def test_sampler_may_change_its_length_while_it_is_walked(length):
    assert draw_order(Grows(range(4), length), 0, 0).tolist() == [0, 1, 2, 3]
