"""Seeds as a function of what they are for, and the streams that `lockstep.init(seed=…)` begins.

A seed is a BLAKE2b hash of what it stands for: neighbouring numbers give unrelated streams, and the value is the same
in every process, Python version and run (Python's own `hash` is none of that).

[Note: streams of ranks] All ranks must draw the same weights and different dropout masks: with the same masks the N
parts of a batch see the same noise N times. So `init(seed=…)` seeds the process-wide generators alike, and the first
engine, made when the weights have been drawn, moves every rank but the first to a stream of its own. The first goes on
undisturbed, as one process does.
"""

from __future__ import annotations

import hashlib
import operator
import random
import struct
from collections.abc import Iterable

import numpy as np
import torch

from lockstep.errors import InputError, InputTypeError

__all__ = [
    "begin_common_stream",
    "begin_rank_streams",
    "check_seed",
    "derive_seed",
    "derive_seeds",
    "forget_rank_streams",
]

_MASK_64 = (1 << 64) - 1
_pack = struct.Struct("<QQQ").pack
_pack_common, _pack_one = struct.Struct("<QQ").pack, struct.Struct("<Q").pack
_pending: tuple[int, int] | None = None  # seed and rank, until the first engine is made


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


def derive_seeds(purpose: bytes, seed: int, epoch: int, indices: Iterable[int]) -> list[int]:
    """`derive_seed` for many indices. What they have in common is hashed once."""
    common = hashlib.blake2b(_pack_common(seed & _MASK_64, epoch & _MASK_64), digest_size=8, person=purpose)
    from_bytes, pack, copy = int.from_bytes, _pack_one, common.copy
    seeds = []
    for index in indices:
        state = copy()
        state.update(pack(index & _MASK_64))
        seeds.append(from_bytes(state.digest(), "little"))
    return seeds


def check_seed(seed: object) -> int:
    """An integer (Python's or numpy's, no bool) that torch takes as a seed, as a Python int.

    Raises:
        InputTypeError: not an integer.
        InputError: below -2**63, or above 2**64-1.
    """
    try:
        number = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(seed, bool):
        raise InputTypeError(f"seed is {seed!r} ({type(seed).__name__}); expected an integer, or None to seed nothing")
    if not -(2**63) <= number < 2**64:
        raise InputError(f"seed is {number}; expected -2**63 to 2**64-1")
    return number


def begin_common_stream(seed: int, rank: int) -> None:
    """Seed torch (CPU and accelerators), numpy and `random`, alike on all ranks. Local."""
    global _pending
    _seed_everything(seed, seed)
    _pending = (seed, rank)


def begin_rank_streams() -> None:
    """Move this rank to a stream of its own, if `begin_common_stream` was called since the last time. Local.

    Rank 0 stays where it is. See [Note: streams of ranks].
    """
    global _pending
    pending, _pending = _pending, None
    if pending is not None and pending[1] > 0:
        value = derive_seed(b"rank", pending[0], 0, pending[1])
        _seed_everything(value, value >> 32)  # torch's generator on the CPU keeps the other half


def forget_rank_streams() -> None:
    """The world is left: engines of other worlds move nothing. Local."""
    global _pending
    _pending = None


def _seed_everything(for_torch: int, for_numpy: int) -> None:
    torch.manual_seed(for_torch)
    random.seed(for_torch)
    np.random.seed(for_numpy & 0xFFFFFFFF)
