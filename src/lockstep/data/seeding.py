"""Seeds as a function of (seed, epoch, index), and the global generators that take them.

A seed is a BLAKE2b hash of what it stands for: neighbouring epochs and indices give unrelated
streams, and the value is the same in every process, Python version and run (Python's own
`hash` is none of that). `purpose` keeps the streams of one (seed, epoch) apart: the shuffle of
an epoch and its augmentations never draw the same numbers.

torch's CPU generator and numpy's legacy one are both a Mersenne Twister that keeps 32 bits of
its seed, so they get different halves of the hash: with the same half, a dataset that draws
from both would see two copies of one stream.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["derive_seed", "make_generator", "preserve_global_rngs", "seed_global_rngs"]

_MASK_64 = (1 << 64) - 1
_pack = struct.Struct("<QQQ").pack


def derive_seed(purpose: bytes, seed: int, epoch: int, index: int = 0) -> int:
    """The seed of one stream of random numbers.

    Args:
        purpose: what the stream is for, at most 16 bytes; streams of different purposes differ.
        seed: the loader's seed; its low 64 bits count.
        epoch: number of the epoch.
        index: index of the sample, or whatever tells the streams of one purpose apart.

    Returns:
        0 … 2**64-1, uniformly distributed over its arguments.

    >>> derive_seed(b"sample", 0, 0, 1) == derive_seed(b"sample", 0, 1, 0)
    False
    """
    packed = _pack(seed & _MASK_64, epoch & _MASK_64, index & _MASK_64)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=purpose).digest(), "little")


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
