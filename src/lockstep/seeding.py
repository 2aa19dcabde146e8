"""Seeds as a function of their purpose, and the random streams that `lockstep.init(seed=…)` begins.

A seed is a BLAKE2b hash of its purpose and numbers: neighbouring numbers give unrelated streams, and the value is the
same in every process, Python version and run (Python's `hash` guarantees none of this).

[Note: streams of ranks] All ranks must draw the same weights but different dropout masks: with the same masks, the N
parts of a batch would see the same noise N times. So `init(seed=…)` seeds the process-wide generators identically, and
an engine moves every rank but the first to its own streams; the first continues undisturbed, like a single process.
Creating the first engine moves the streams of numpy and `random`. Torch's, which draw weights, move when an engine's
first forward pass begins: other models may be made after the first engine, and some are never trained (the target of
random network distillation), so that no engine synchronises them. If the script has reseeded torch in between, or
restored its state, that is kept; reseeding with the same number cannot be detected. A pass without gradients may be a
trial whose draws are undone afterwards, so the first pass with gradients checks again.
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
    "begin_rank_streams_of_engine",
    "begin_torch_stream",
    "check_seed",
    "derive_seed",
    "derive_seeds",
    "forget_rank_streams",
]

_MASK_64 = (1 << 64) - 1
_pack = struct.Struct("<QQQ").pack
_pack_common, _pack_one = struct.Struct("<QQ").pack, struct.Struct("<Q").pack
_pending: tuple[int, int] | None = None  # seed and rank, until the first engine is created
# The rank's seed, and torch's seed when the first engine was created; until its first forward pass.
_pending_of_torch: tuple[int, int] | None = None


def derive_seed(purpose: bytes, seed: int, epoch: int, index: int = 0) -> int:
    """The seed of one stream of random numbers.

    Args:
        purpose: purpose of the stream, at most 16 bytes; streams of different purposes differ.
        seed: the loader's seed; its low 64 bits count.
        epoch: number of the epoch.
        index: index of the sample, or another number that distinguishes the streams of one purpose.

    Returns:
        An integer in 0 … 2**64-1, uniformly distributed over the arguments.

    >>> derive_seed(b"sample", 0, 0, 1) == derive_seed(b"sample", 0, 1, 0)
    False
    """
    packed = _pack(seed & _MASK_64, epoch & _MASK_64, index & _MASK_64)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=purpose).digest(), "little")


def derive_seeds(purpose: bytes, seed: int, epoch: int, indices: Iterable[int]) -> list[int]:
    """`derive_seed` for many indices; their common arguments are hashed once."""
    common = hashlib.blake2b(_pack_common(seed & _MASK_64, epoch & _MASK_64), digest_size=8, person=purpose)
    from_bytes, pack, copy = int.from_bytes, _pack_one, common.copy
    seeds = []
    for index in indices:
        state = copy()
        state.update(pack(index & _MASK_64))
        seeds.append(from_bytes(state.digest(), "little"))
    return seeds


def check_seed(seed: object) -> int:
    """Convert a seed that torch accepts, an integer of Python or numpy but no bool, to a Python int.

    Raises:
        InputTypeError: not an integer.
        InputError: below -2**63, or above 2**64-1.
    """
    try:
        number = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(seed, bool | np.bool_):
        raise InputTypeError(f"seed is {seed!r} ({type(seed).__name__}); expected an integer, or None to seed nothing")
    if not -(2**63) <= number < 2**64:
        raise InputError(f"seed is {number}; expected -2**63 to 2**64-1")
    return number


def begin_common_stream(seed: int, rank: int) -> None:
    """Seed torch (CPU and accelerators), numpy and `random` identically on all ranks. Local."""
    global _pending
    forget_rank_streams()
    torch.manual_seed(seed)
    _seed_others(seed, seed)
    _pending = (seed, rank)


def begin_rank_streams() -> None:
    """Move this rank to its own streams, if `begin_common_stream` was called since the last time. Local.

    Rank 0 keeps its streams. See [Note: streams of ranks].
    """
    begin_rank_streams_of_engine()
    begin_torch_stream(trains=True)


def begin_rank_streams_of_engine() -> None:
    """The same for numpy and `random`, when an engine is created; `begin_torch_stream` follows for torch. Local."""
    global _pending, _pending_of_torch
    pending, _pending = _pending, None
    if pending is not None and pending[1] > 0:
        value = derive_seed(b"rank", pending[0], 0, pending[1])
        _seed_others(value, value >> 32)  # torch's generator on the CPU keeps the other half
        _pending_of_torch = (value, torch.initial_seed())


def begin_torch_stream(trains: bool) -> None:
    """The same for torch, when a forward pass of an engine begins, with gradients if it `trains`. Local."""
    global _pending_of_torch
    pending = _pending_of_torch
    if pending is None:
        return
    if trains:
        _pending_of_torch = None
    if torch.initial_seed() == pending[1]:
        torch.manual_seed(pending[0])


def forget_rank_streams() -> None:
    """Forget pending moves when the world is left, so that engines of other worlds move nothing. Local."""
    global _pending, _pending_of_torch
    _pending = _pending_of_torch = None


def _seed_others(for_random: int, for_numpy: int) -> None:
    random.seed(for_random)
    np.random.seed(for_numpy & 0xFFFFFFFF)
