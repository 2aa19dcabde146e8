"""Collate functions that draw from generators of their own: a warning."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch

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
    make, name, num_workers: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks draw alike, as all begin with one seed."""
    log._warned.clear()
    list(DataLoader(list(torch.ones(8, 2)), 2, collate_fn=make(), num_workers=num_workers))
    told = "\n".join(each.getMessage() for each in caplog.records) + capfd.readouterr().err
    assert (f"draws from a generator of its own, {name}: what it draws depends on the batches" in told) == bool(name)
    assert ("collate_fn (" in told) == bool(name)
