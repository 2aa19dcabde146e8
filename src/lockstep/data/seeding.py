"""Seeds as a function of (seed, epoch, index), and the process-wide generators that take them.

See `lockstep.seeding.derive_seed`. Its `purpose` keeps the streams of one (seed, epoch) apart: the shuffle of
an epoch and its augmentations never draw the same numbers.

torch's CPU generator and numpy's legacy one are both a Mersenne Twister that keeps 32 bits of
its seed, so they get different halves of the hash: with the same half, a dataset that draws
from both would see two copies of one stream.

Generators of accelerators stay as they are: a dataset has no business drawing there, and
touching them would initialise the device in every worker.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from lockstep.errors import DataError
from lockstep.seeding import derive_seed as derive_seed  # `as` marks a re-export for type checkers
from lockstep.seeding import derive_seeds as derive_seeds

__all__ = ["GLOBAL_RNGS", "GlobalRng", "make_generator", "preserve_global_rngs", "seed_global_rngs"]


def make_generator(purpose: bytes, seed: int, epoch: int, index: int = 0) -> torch.Generator:
    """A fresh CPU generator at the start of the stream that `derive_seed` names."""
    return torch.Generator().manual_seed(derive_seed(purpose, seed, epoch, index))


class GlobalRng(Protocol):
    """One process-wide generator. Seeds are 0 … 2**64-1."""

    def seed(self, value: int) -> None:
        """Start it anew."""

    def is_fresh(self, value: int) -> bool:
        """Whether nobody has drawn or seeded since `seed(value)`. Leaves it anywhere."""

    def state(self) -> Any:
        """Where it is. Leaves it anywhere: it is to be seeded now."""

    def restore(self, state: Any) -> None:
        """Go on from there."""


class _Torch:
    """torch's generator on the CPU."""

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)

    def is_fresh(self, value: int) -> bool:
        return torch.default_generator.get_state().numpy().tobytes() == _fresh_torch(value)

    def state(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def restore(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)


@lru_cache(maxsize=2)
def _fresh_torch(value: int) -> bytes:
    return torch.Generator().manual_seed(value).get_state().numpy().tobytes()


class _Python:
    """That of Python's `random`. It is fresh if its next number is the first: to read the state takes far longer."""

    def seed(self, value: int) -> None:
        random.seed(value)

    def is_fresh(self, value: int) -> bool:
        return random.getrandbits(64) == _first_of_python(value)

    def state(self) -> Any:
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate(state)


@lru_cache(maxsize=2)
def _first_of_python(value: int) -> int:
    return random.Random(value).getrandbits(64)


class _Numpy:
    """That behind `np.random.rand` and its like.

    `np.random.get_state` and `set_state` copy the state number by number, and take as long together as seeding 20
    samples. numpy tells where a Mersenne Twister's state lies, and there it is copied at once.

    [Note: the second normal number] Normal numbers are made in pairs, and the second one is kept beside the state.
    Whether there is one, only `get_state` says. So one is drawn: if the state stays as it was, this was the
    kept one, and now its value is known; else there was none, and the state was copied before.
    """

    def seed(self, value: int) -> None:
        np.random.seed(value >> 32)  # the half that torch's generator drops

    def is_fresh(self, value: int) -> bool:
        return np.random.random_sample() == _first_of_numpy(value >> 32)

    def state(self) -> Any:
        generator = _mersenne_twister()
        if generator is None:
            return np.random.get_state(legacy=False)
        memory = _memory_of(generator)
        normal = np.random.standard_normal()
        return generator, memory, normal if _memory_of(generator) == memory else None

    def restore(self, state: Any) -> None:
        if isinstance(state, dict):
            np.random.set_state(state)
            return
        generator, memory, normal = state
        if _mersenne_twister() is not generator:  # a sample has put another one there
            np.random.set_bit_generator(generator)  # type: ignore[attr-defined]
        np.random.seed(0)  # The normal number that samples may have left is gone.
        with generator.lock:
            ctypes.memmove(generator.ctypes.state_address, memory, _STATE_BYTES)
        if normal is not None:
            np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": normal})


@lru_cache(maxsize=2)
def _first_of_numpy(value: int) -> float:
    return float(np.random.RandomState(value).random_sample())


_STATE_BYTES = 625 * 4  # of a Mersenne Twister: 624 numbers, and the position among them


def _mersenne_twister() -> Any:
    """numpy's process-wide generator; None where it is of another kind, or its memory is laid out in another way."""
    find = getattr(np.random, "get_bit_generator", None)  # since numpy 1.24
    generator = None if find is None else find()
    return generator if type(generator) is np.random.MT19937 and _is_as_known() else None


def _memory_of(generator: Any) -> bytes:
    with generator.lock:
        return ctypes.string_at(generator.ctypes.state_address, _STATE_BYTES)


@cache
def _is_as_known() -> bool:
    """Whether this release of numpy keeps the state as the numbers and the position after them."""
    example = np.random.MT19937(1)
    example.random_raw(5)
    state = example.state["state"]
    return _memory_of(example) == np.append(state["key"], state["pos"]).astype(np.uint32).tobytes()


GLOBAL_RNGS: Sequence[GlobalRng] = (_Torch(), _Python(), _Numpy())


def seed_global_rngs(value: int) -> None:
    """Start the process-wide generators of torch (CPU), numpy and `random` anew.

    Args:
        value: 0 … 2**64-1.
    """
    for rng in GLOBAL_RNGS:
        rng.seed(value)


@contextmanager
def preserve_global_rngs(thread: int | None = None, advice: str = "") -> Iterator[None]:
    """Put the process-wide generators back afterwards, whatever happens inside. They are to be seeded at once.

    Args:
        thread: the one that trains; seeding in another one is an error, unless it is the main thread. None for any.
        advice: what else helps, for the error.

    Raises:
        DataError: another thread may draw from them meanwhile.
    """
    now = threading.current_thread()
    if now is not threading.main_thread() and thread not in (None, now.ident):
        raise DataError(
            "batches are fetched in another thread than the one that made the loader. Torch's, numpy's and "
            "Python's generators belong to all threads, so seeding them here would change what the training draws "
            f"meanwhile: dropout. Make the loader in the thread that fetches{advice}"
        )
    before = [rng.state() for rng in GLOBAL_RNGS]
    try:
        yield
    finally:
        for rng, state in zip(GLOBAL_RNGS, before, strict=True):
            rng.restore(state)
