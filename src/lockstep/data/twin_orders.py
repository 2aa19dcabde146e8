"""Warns of two loaders that walk one random order side by side.

An order follows from seed, epoch and number of samples, and a sample's randomness from its index in addition. So two
loaders of one dataset with one seed yield the same samples with the same augmentation, where torch's draw on: mixup
over two loaders mixes each image with itself, and two domains of equally many images keep one pairing for good.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from lockstep.data.iteration import EpochProgress
from lockstep.log import get_logger, warn_once

__all__ = ["Walk", "note_walk"]

_logger = get_logger(__name__)
_walks: list[tuple[weakref.ref[EpochProgress], Walk]] = []


class Walk(NamedTuple):
    """What a random order follows from.

    Attributes:
        mark: of a sampler's order; 0 without a sampler.
    """

    seed: int
    epoch: int
    num_samples: int
    mark: int


def note_walk(progress: EpochProgress, walk: Walk) -> None:
    """An iteration for training begins that walks a random order. Local."""
    under_way = [(reference, other) for reference, other in _walks if _is_open(reference)]
    if any(other == walk for _, other in under_way):
        warn_once(
            _logger,
            f"two loaders are walked side by side in the same random order (both have seed={walk.seed}, "
            f"{walk.num_samples} samples, and are in epoch {walk.epoch}): what they yield goes together in every step, "
            "and of one dataset it is the same. Unless that is meant, give one of them another seed",
        )
    _walks[:] = [*under_way, (weakref.ref(progress), walk)]


def _is_open(reference: weakref.ref[EpochProgress]) -> bool:
    progress = reference()
    return progress is not None and progress.is_open
