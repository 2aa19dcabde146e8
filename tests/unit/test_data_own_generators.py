"""Warnings of what draws depend on: collate functions with generators of their own, and who says it how often."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from loader_cases import Drawing, Numbers, run_ranks_in_turn
from lockstep import log
from lockstep.data import DataLoader


class Masks:
    """Drops some values of each sample, by a generator that it makes when it is first called."""

    def __init__(self) -> None:
        self.rng = None

    def __call__(self, samples):
        if self.rng is None:
            self.rng = np.random.default_rng(0)
        return torch.stack(samples) * torch.from_numpy(self.rng.random((len(samples), 1)))

    def collate(self, samples):
        return self(samples)


def mask(samples, rng):
    return torch.stack(samples) * rng.random()


def masks_by_closure():
    rng = random.Random(0)
    return lambda samples: mask(samples, rng)


def holds_and_draws_nothing():
    return functools.partial(lambda samples, rng: torch.stack(samples), rng=random.Random(0))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Masks, "rng"),
        (lambda: Masks().collate, "rng"),
        (lambda: functools.partial(mask, rng=random.Random(0)), "rng"),
        (lambda: functools.partial(lambda masks, samples: masks(samples), Masks()), "args[0].rng"),
        (masks_by_closure, "rng"),
        (holds_and_draws_nothing, None),
        (lambda: torch.stack, None),
    ],
)
def test_a_collate_function_with_a_generator_of_its_own_is_warned_of(
    make, name, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks draw alike, as all begin with one seed."""
    log._warned.clear()
    list(DataLoader(list(torch.ones(8, 2)), 2, collate_fn=make(), num_workers=num_workers))
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == bool(name)
    for text in told:
        assert text.startswith("collate_fn (")
        assert f"draws from a generator of its own, {name}: what it draws depends on the batches" in text


# ---- who says it, and how often -----------------------------------------------------------------------


class OwnGenerator(Numbers):
    def __init__(self, length):
        super().__init__(length)
        self.rng = random.Random(0)

    def __getitem__(self, index):
        return super().__getitem__(index) + self.rng.random()


class Compose:
    """As torchvision's and MONAI's."""

    def __init__(self, *transforms) -> None:
        self.transforms = transforms

    def __call__(self, sample):
        return functools.reduce(lambda value, transform: transform(value), self.transforms, sample)


class Jitter:
    def __init__(self, rng) -> None:
        self.rng = rng

    def __call__(self, sample):
        return sample + self.rng.random()


class Transformed(Numbers):
    """Has many records, which are looked at before its transform."""

    def __init__(self, transform):
        super().__init__(8)
        self.records = [(f"{index}.png", Numbers(index)) for index in range(1000)]
        self.labels = {index: [index] for index in range(1000)}
        self.transform = transform

    def __getitem__(self, index):
        return self.transform(super().__getitem__(index)) if callable(self.transform) else self.transform["x"](index)


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (Compose(float, Jitter(random.Random(0))), "transform.transforms[1].rng"),
        ({"x": Jitter(np.random.RandomState(0))}, "transform['x'].rng"),
        (Jitter(np.random.RandomState(np.random.PCG64(0))), "transform.rng"),
    ],
)
def test_a_generator_is_found_in_a_split_of_a_dataset_with_many_records(
    transform, name, caplog: pytest.LogCaptureFixture
) -> None:
    log._warned.clear()
    train, _ = torch.utils.data.random_split(Transformed(transform), [6, 2])
    list(DataLoader(torch.utils.data.ConcatDataset([train]), 2))
    (warning,) = caplog.records
    assert f"draws from a generator of its own, datasets[0].dataset.{name}: " in warning.getMessage()


class Batches(Numbers):
    """Draws for a batch in one go, as a transform of Hugging Face's datasets does; for one sample, too."""

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        return [index + random.random() / 2 for index in indices]


def collate_and_draw(samples):
    return torch.tensor(samples) * torch.rand(())


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("dataset", "options", "text"),
    [
        (OwnGenerator(8), {}, "the dataset (OwnGenerator) draws from a generator of its own, rng"),
        (Batches(8), {}, "the dataset (Batches) draws random numbers in __getitems__"),
        (range(8), {"collate_fn": collate_and_draw}, "collate_fn (collate_and_draw) draws random numbers"),
    ],
)
def test_workers_have_the_training_process_say_it_once(
    dataset, options, text, persistent: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    log._warned.clear()
    loader = DataLoader(dataset, 2, num_workers=2, persistent_workers=persistent, **options)
    for _ in range(2):
        assert len(list(loader)) == 4
    assert [text in each.getMessage() for each in caplog.records] == [True]
    assert capfd.readouterr().err.count(text) == 1, "no worker has said it beside"


# ---- seeds of a worker --------------------------------------------------------------------------------


class SeedsItself(Numbers):
    """As RAFT's datasets: once in each worker, by its number, or by torch's seed for it."""

    is_seeded = False

    def __init__(self, length, name):
        super().__init__(length)
        self.name = name

    def __getitem__(self, index):
        info = get_worker_info()
        if not self.is_seeded and info is not None:
            torch.manual_seed(getattr(info, self.name))
            self.is_seeded = True
        return super().__getitem__(index) + torch.rand(())


class SeedsEachSample(Numbers):
    def __getitem__(self, index):
        torch.manual_seed(index)
        return super().__getitem__(index) + torch.rand(())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        (SeedsItself(8, "id"), "SeedsItself"),
        (SeedsItself(8, "seed"), "SeedsItself"),
        (SeedsItself(4, "id") + SeedsItself(4, "id"), "ConcatDataset"),
        (SeedsEachSample(8), None),
        (SeedsEachSample(4) + Drawing(4), None),
        (Drawing(8), None),
    ],
)
def test_a_dataset_that_seeds_itself_once_in_a_worker_is_warned_of(
    dataset, named, batch_size, num_workers, caplog: pytest.LogCaptureFixture
) -> None:
    log._warned.clear()
    collate_fn = list if "Concat" in str(type(dataset)) else None
    list(DataLoader(dataset, batch_size, num_workers=num_workers, collate_fn=collate_fn))
    told = [each.getMessage().split(" seeds torch's generator in the first")[0] for each in caplog.records]
    assert told == ([f"the dataset ({named})"] if named and num_workers else [])


# ---- what the warnings advise -------------------------------------------------------------------------


class OneByOne(Numbers):
    """As the warning of `__getitems__` advises."""

    def __getitem__(self, index):
        return Batches(self.length)[index]


def test_a_wrapper_without_getitems_has_samples_with_draws_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    log._warned.clear()
    expected = run_ranks_in_turn(OneByOne(12), 1, batch_size=6)
    assert run_ranks_in_turn(OneByOne(12), 2, batch_size=6) == expected
    assert run_ranks_in_turn(OneByOne(12), 3, batch_size=6) == expected
    assert not caplog.records
    assert run_ranks_in_turn(Batches(12), 2, batch_size=6) != expected
    (warning,) = caplog.records
    assert "wrap it in a Dataset whose __getitem__(index) returns dataset[index]" in warning.getMessage()
