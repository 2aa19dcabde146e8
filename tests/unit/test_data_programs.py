"""What training scripts do with samplers, collate functions and several loaders."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from loader_cases import WORLDS, Drawing, Numbers, Seeded, run_epoch, run_ranks_in_turn
from lockstep import log
from lockstep.data import DataLoader
from lockstep.data.fingerprints import fingerprint_of_data
from lockstep.errors import DataError


@pytest.fixture(autouse=True)
def nothing_was_said() -> None:
    log._warned.clear()


# ---- samplers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Seeded, Drawing])
def test_an_index_that_comes_again_is_augmented_anew(kind: Any) -> None:
    """As a rare class is, of which a WeightedRandomSampler draws each image many times."""
    order = [4, 4, 1, 4, 1, 2]
    expected = run_ranks_in_turn(kind(6), 1, batch_size=3, sampler=order)
    samples = [tuple(sample) for batch in expected for sample in batch]
    assert [int(index) for index, *_ in samples] == order
    assert len(set(samples)) == len(order)
    for world_size in WORLDS[1:]:
        assert run_ranks_in_turn(kind(6), world_size, batch_size=3, sampler=order) == expected
    in_order, by_sampler = DataLoader(kind(6), 6), DataLoader(kind(6), 6, sampler=range(6))
    assert run_epoch(in_order)[0][0] == run_epoch(by_sampler)[0][0], "once is as without a sampler"


class Curriculum(Sampler[int]):
    """A sampler with epochs, which counts them itself where it is told to."""

    def __init__(self, counts: bool = False) -> None:
        self.now, self.counts = 0, counts

    def set_epoch(self, number: int, start: int = 0) -> None:
        self.now = number + start

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        yield from (self.now, self.now + 1)
        self.now += self.counts


class Slotted(Curriculum):
    """Takes no attribute beside its own, so that its calls cannot be seen."""

    __slots__ = ("counts", "now")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__slots__:
            raise AttributeError(name)
        object.__setattr__(self, name, value)


class Around:
    """Hands on what it does not have itself."""

    def __init__(self, inner: Curriculum) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Any:
        return iter(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def with_a_method_of_its_own() -> Curriculum:
    sampler = Curriculum()
    sampler.set_epoch = functools.partial(Curriculum.set_epoch, sampler)  # type: ignore[method-assign]
    return sampler


def epoch_of(loader: DataLoader[Any]) -> int:
    """Walks one and says which it was, as the sampler saw it."""
    return int(run_epoch(loader)[0][0][0])


def test_a_script_may_tell_the_sampler_its_epochs() -> None:
    loader = DataLoader(range(100), 2, sampler=(sampler := Curriculum()))
    for epoch in (40, 41, 41, 43):
        sampler.set_epoch(epoch)
        assert epoch_of(loader) == epoch
    assert [epoch_of(loader) for _ in range(2)] == [44, 45], "told once, the loader continues"
    sampler.set_epoch(number=50, start=1)
    assert (epoch_of(loader), loader.epoch) == (51, 51), "what it makes of it is its own business"
    sampler.set_epoch(60)
    loader.set_epoch(7)
    assert epoch_of(loader) == 7, "the last word counts"
    twin = copy.deepcopy(sampler)
    twin.set_epoch(3)
    assert (twin.now, sampler.now) == (3, 7)


class Repeating(DistributedSampler[Any]):
    """Each sample three times, and so many of these as there are samples: as DeiT's RASampler and timm's."""

    def __iter__(self) -> Any:
        order = [index for index in super().__iter__() for _ in range(3)]
        return iter(order[: len(self)])


@pytest.mark.parametrize("kind", [DistributedSampler, Repeating])
def test_a_sampler_of_one_replica_is_an_order_of_all_samples(kind: Any) -> None:
    def run(world_size: int) -> Any:
        sampler = kind(range(12), num_replicas=1, rank=0, seed=5)
        return run_ranks_in_turn(Drawing(12), world_size, batch_size=4, sampler=sampler, epochs=2)

    expected = run(1)
    order = [int(sample[0]) for batch in expected for sample in batch]
    assert len(set(order)) == (12 if kind is DistributedSampler else 4)
    second = kind(range(12), num_replicas=1, rank=0, seed=5)
    second.set_epoch(1)
    assert order == list(second), "it was told the epoch"
    for world_size in WORLDS[1:]:
        assert run(world_size) == expected


class ByLength(BatchSampler):
    """Batches of samples of one kind, in an order drawn anew each time, as torchvision's GroupedBatchSampler."""

    def __iter__(self) -> Any:
        for batch in torch.randperm(8).tolist():
            yield [batch % 4 * 6 + batch // 4 * 3 + place for place in torch.randperm(3).tolist()]


class OneAfterTheOther(Sampler[int]):
    """Batches of one size as an order of samples, for a loader with that batch_size."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return (index for batch in self.batches for index in batch)

    def __len__(self) -> int:
        return 24


def test_batches_of_one_size_are_an_order_of_samples() -> None:
    sampler = OneAfterTheOther(ByLength(range(24), 3, drop_last=False))
    expected = run_ranks_in_turn(range(24), 1, batch_size=3, sampler=sampler, epochs=2)
    assert all(len({index // 6 for index in batch}) == 1 for batch in expected)
    assert expected != run_ranks_in_turn(range(24), 1, batch_size=3, sampler=sampler), "each epoch in another order"
    for world_size in WORLDS:
        torch.manual_seed(world_size)
        assert run_ranks_in_turn(range(24), world_size, batch_size=3, sampler=sampler, epochs=2) == expected


def tell_as_mmengine_does(loader: Any, epoch: Any) -> None:
    """The lines of its hook, which it registers by default."""
    if hasattr(loader, "sampler") and hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)
    elif hasattr(loader, "batch_sampler") and hasattr(loader.batch_sampler.sampler, "set_epoch"):
        loader.batch_sampler.sampler.set_epoch(epoch)


@pytest.mark.parametrize("sampler", [None, Curriculum()])
@pytest.mark.parametrize("copied", [lambda loader: loader, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_program_may_tell_the_epoch_by_the_batch_sampler(sampler: Any, copied: Any) -> None:
    def order_of(tell: Any) -> list[list[int]]:
        first = DataLoader(range(100), 60, shuffle=sampler is None, sampler=sampler)
        loader = copied(first)
        tell(loader)
        return [*run_orders(loader), *run_orders(loader), *run_orders(first)]

    expected = order_of(lambda loader: loader.set_epoch(3))
    assert order_of(lambda loader: tell_as_mmengine_does(loader, 3)) == expected
    assert order_of(lambda loader: tell_as_mmengine_does(loader, np.int64(3))) == expected
    assert order_of(lambda loader: None) != expected


def run_orders(loader: Any) -> list[list[int]]:
    return [loaded for loaded, _ in run_epoch(loader)]


def test_what_was_told_by_the_batch_sampler_counts_for_one_epoch() -> None:
    loader, told = DataLoader(range(9), 4, shuffle=True), DataLoader(range(9), 4, shuffle=True)
    tell_as_mmengine_does(told, 3)
    loader.set_epoch(3)
    assert [run_orders(told) for _ in range(3)] == [run_orders(loader) for _ in range(3)], "it continues from there"
    tell_as_mmengine_does(told, 3)
    told.set_epoch(1)
    loader.set_epoch(1)
    assert run_orders(told) == run_orders(loader), "the last word counts"
    batches = iter(told)
    next(batches)
    told.load_state_dict(told.state_dict())
    tell_as_mmengine_does(told, 2)
    assert [len(order) for order in run_orders(told)] == [4, 1], "a resumed epoch is gone on with"


def test_the_batch_sampler_has_the_attributes_of_torchs() -> None:
    loader = DataLoader(range(9), 4, shuffle=True, drop_last=True)
    assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (4, True)
    with pytest.raises(DataError, match="Iterate the loader"):
        iter(loader.batch_sampler.sampler)
    with pytest.raises(DataError, match="epoch is -1"):
        loader.batch_sampler.sampler.set_epoch(-1)
    order = [3, 1, 2]
    assert DataLoader(range(9), 4, sampler=order).batch_sampler.sampler is order


@pytest.mark.parametrize(
    "sampler", [Curriculum(), Curriculum(counts=True), Slotted(), Around(Curriculum()), with_a_method_of_its_own()]
)
def test_else_the_loader_tells_it(sampler: Any) -> None:
    loader = DataLoader(range(100), 2, sampler=sampler)
    assert [epoch_of(loader) for _ in range(3)] == [0, 1, 2]
    state = loader.state_dict()
    loader.load_state_dict({**state, "epoch": 1, "epoch_after": 0})
    assert [epoch_of(loader) for _ in range(2)] == [1, 2]


def half_an_epoch(loader: DataLoader[Any]) -> tuple[list[int], dict[str, Any]]:
    batches = iter(loader)
    first = [int(index) for batch in itertools.islice(batches, 2) for index in batch]
    return first, loader.state_dict()


def test_an_epoch_that_a_sampler_orders_is_gone_on_with() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(range(20), 4, sampler=WeightedRandomSampler(torch.arange(1.0, 21), 20), seed=3)

    whole = [index for samples, _ in run_epoch(make()) for index in samples]
    first, state = half_an_epoch(make())
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == {**state, "next_epoch": 0}
    assert first + [index for samples, _ in run_epoch(resumed) for index in samples] == whole


def test_a_sampler_that_cannot_give_its_order_again_is_an_error() -> None:
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(range(20), 4, sampler=RandomSampler(range(20), generator=generator))
    _, state = half_an_epoch(loader)
    loader.load_state_dict(state)  # the generator has gone on, as it stands at its beginning in another process
    with pytest.raises(DataError, match="RandomSampler gives epoch 0 a different order"):
        iter(loader)


# ---- data that ranks hold ------------------------------------------------------------------------------------


def test_features_may_differ_in_the_last_bits() -> None:
    features = torch.cat([torch.randn(500, 3, generator=torch.Generator().manual_seed(0)), torch.ones(12, 3)])
    other = features * (1 + 1e-6 * torch.rand_like(features))
    assert fingerprint_of_data(TensorDataset(features)) == fingerprint_of_data(TensorDataset(other))
    for changed in (features.flip(0), -features, features * 4, torch.zeros_like(features)):
        assert fingerprint_of_data(TensorDataset(features)) != fingerprint_of_data(TensorDataset(changed))
    assert fingerprint_of_data(Numbers(3)) != fingerprint_of_data(Seeded(3))
