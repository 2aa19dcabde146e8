"""Seeds as a function of (seed, epoch, index), and the global generators that take them.

See `lockstep.seeding.derive_seed`. Its `purpose` keeps the streams of one (seed, epoch) apart: the shuffle of
an epoch and its augmentations never draw the same numbers.

torch's CPU generator and numpy's legacy one are both a Mersenne Twister that keeps 32 bits of
its seed, so they get different halves of the hash: with the same half, a dataset that draws
from both would see two copies of one stream.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lockstep.seeding import derive_seed as derive_seed  # `as` marks a re-export for type checkers

__all__ = ["make_generator", "preserve_global_rngs", "seed_global_rngs"]


def make_generator(purpose: bytes, seed: int, epoch: int, index: int = 0) -> torch.Generator:
    """A fresh CPU generator at the start of the stream that `derive_seed` names."""
    return torch.Generator().manual_seed(derive_seed(purpose, seed, epoch, index))


def seed_global_rngs(value: int) -> None:
    """Start the process-wide generators of torch (CPU), numpy and `random` anew.

    Generators of accelerators stay as they are: a dataset has no business drawing there, and
    touching them would initialise the device in every worker.

    Args:
        value: 0 … 2**64-1.
    """
    torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value >> 32)  # the half that torch's generator drops


@contextmanager
def preserve_global_rngs() -> Iterator[None]:
    """Put the process-wide generators back afterwards, whatever happens inside."""
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
