"""Seeds as a function of (seed, epoch, index), and the process-wide generators that take them.

See `lockstep.seeding.derive_seed`. Its `purpose` keeps the streams of one (seed, epoch) apart: the shuffle of
an epoch and its augmentations never draw the same numbers.

torch's CPU generator and numpy's legacy one are both a Mersenne Twister that keeps 32 bits of its seed, so they get
different halves of the hash: with the same half, a dataset that draws from both would see two copies of one stream.

CUDA's is the one of the current device, and only in a process that uses CUDA already: touching it
would initialise the device in every worker.
"""

from __future__ import annotations

import ctypes
import random
import sys
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

__all__ = ["GLOBAL_RNGS", "GlobalRng", "make_generator", "preserve_global_rngs", "seed_global_rngs", "states_after"]


_get_bit_generator = getattr(np.random, "get_bit_generator", None)  # since numpy 1.24
_STATE_BYTES = 625 * 4  # of a Mersenne Twister: 624 numbers, and the position among them


def make_generator(purpose: bytes, seed: int, epoch: int, index: int = 0) -> torch.Generator:
    """A fresh CPU generator at the start of the stream that `derive_seed` names."""
    return torch.Generator().manual_seed(derive_seed(purpose, seed, epoch, index))


class GlobalRng(Protocol):
    """One process-wide generator. Seeds are 0 … 2**64-1."""

    def seed(self, value: int) -> None:
        """Start it anew."""

    def state(self) -> Any:
        """Where it is. It is to be restored: numpy's forgets a normal number that it keeps for the next call."""

    def restore(self, state: Any) -> None:
        """Resume from there."""

    def is_at(self, state: Any) -> bool:
        """Whether nobody has drawn or seeded since that state, to which `seed` led, was restored."""


class _Torch(GlobalRng):
    """torch's generator on the CPU."""

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)

    def state(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def restore(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)

    def is_at(self, state: torch.Tensor) -> bool:
        return _same_bytes(torch.default_generator.get_state(), state)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numpy().tobytes() == other.numpy().tobytes()  # in a third of the time of `torch.equal`


class _Python(GlobalRng):
    """That of Python's `random`.

    `random.getstate` makes 625 numbers of the state, and `setstate` takes them apart again, which takes longer than
    to fetch some cheap samples. CPython keeps the state behind the header of the object, and there it is copied at
    once. The second normal number of a pair is kept in an attribute.
    """

    def seed(self, value: int) -> None:
        random.seed(value)

    def state(self) -> tuple[Any, ...]:
        generator = _known_python()
        return random.getstate() if generator is None else (_python_memory(generator), generator.gauss_next)

    def restore(self, state: tuple[Any, ...]) -> None:
        generator = _known_python()
        if generator is None:
            random.setstate(state)
            return
        memory, generator.gauss_next = state
        ctypes.memmove(id(generator) + object.__basicsize__, memory, _STATE_BYTES)

    def is_at(self, state: tuple[Any, ...]) -> bool:
        return self.state() == state


def _python_memory(generator: random.Random) -> bytes:
    return ctypes.string_at(id(generator) + object.__basicsize__, _STATE_BYTES)


@cache
def _known_python() -> Any:
    """What `random` draws from, if this is CPython, and keeps position and numbers behind the header of the object."""
    generator = getattr(random.getstate, "__self__", None)
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return None
    example = random.Random(1)
    example.getrandbits(5 * 32)
    *numbers, position = example.getstate()[1]
    is_known = _python_memory(example) == np.array([position, *numbers], np.uint32).tobytes()
    return generator if is_known else None


class _Numpy(GlobalRng):
    """That behind `np.random.rand` and its like.

    `np.random.get_state` and `set_state` copy the state number by number, and take as long together as seeding 20
    samples. numpy tells where a Mersenne Twister's state lies, and there it is copied at once.

    [Note: the second normal number] Normal numbers are made in pairs, and the second one is kept beside the state.
    Whether there is one, only `get_state` says. So one is drawn: if the position stays as it was, this was the kept
    one, and now its value is known; else there was none, and the second of the new pair is drawn, too. A copy of the
    state is put there when none is kept, and none is until somebody has drawn.
    """

    _without_normal = b""  # what was put there last, with none

    def seed(self, value: int) -> None:
        np.random.seed(value >> 32)  # the half that torch's generator drops

    def state(self) -> Any:
        generator = _mersenne_twister()
        if generator is None:
            return np.random.get_state(legacy=False)
        memory, normal = _memory_of(generator), _take_normal(generator)
        self._put(generator, memory)
        return generator, memory, normal

    def restore(self, state: Any) -> None:
        if isinstance(state, dict):
            np.random.set_state(state)
            return
        generator, memory, normal = state
        if _mersenne_twister() is not generator:  # a sample has put another one there
            np.random.set_bit_generator(generator)  # type: ignore[attr-defined]
        if _memory_of(generator) != self._without_normal:
            _take_normal(generator)
        self._put(generator, memory)
        if normal is not None:
            self._without_normal = b""
            np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": normal})

    def is_at(self, state: Any) -> bool:
        if isinstance(state, dict):
            return _are_equal(np.random.get_state(legacy=False), state)
        generator, memory, _ = state
        return _mersenne_twister() is generator and _memory_of(generator) == memory

    def _put(self, generator: Any, memory: bytes) -> None:
        with generator.lock:
            ctypes.memmove(generator.ctypes.state_address, memory, _STATE_BYTES)
        self._without_normal = memory


def _take_normal(generator: Any) -> float | None:
    """The normal number that was kept beside the state, and is kept no more; None if none was. Moves the state."""
    position = ctypes.c_uint32.from_address(generator.ctypes.state_address + _STATE_BYTES - 4)
    before = position.value
    normal = np.random.standard_normal()
    if position.value == before:
        return normal
    np.random.standard_normal()  # the second of the pair
    return None


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    return bool(np.all(one == other))


def _mersenne_twister() -> Any:
    """numpy's process-wide generator; None where it is of another kind, or its memory is laid out in another way."""
    generator = None if _get_bit_generator is None else _get_bit_generator()
    return generator if type(generator) is np.random.MT19937 and _is_numpys_as_known() else None


def _memory_of(generator: Any) -> bytes:
    with generator.lock:
        return ctypes.string_at(generator.ctypes.state_address, _STATE_BYTES)


@cache
def _is_numpys_as_known() -> bool:
    """Whether this release of numpy keeps the state as the numbers and the position after them."""
    example = np.random.MT19937(1)
    example.random_raw(5)
    state = example.state["state"]
    return _memory_of(example) == np.append(state["key"], state["pos"]).astype(np.uint32).tobytes()


class _Cuda(GlobalRng):
    """torch's generator on the current GPU: a dataset may hold its data there, and draw there. None without CUDA."""

    def seed(self, value: int) -> None:
        generator = _cudas_generator()
        if generator is not None:
            generator.manual_seed(value)

    def state(self) -> torch.Tensor | None:
        generator = _cudas_generator()
        return None if generator is None else generator.get_state()

    def restore(self, state: torch.Tensor | None) -> None:
        generator = _cudas_generator()
        if generator is not None and state is not None:
            generator.set_state(state)
        elif generator is not None:  # CUDA was initialised meanwhile
            generator.manual_seed(torch.initial_seed())  # as `torch.manual_seed` would have had it

    def is_at(self, state: torch.Tensor | None) -> bool:
        now = self.state()
        return now is state or (now is not None and state is not None and _same_bytes(now, state))


def _cudas_generator() -> torch.Generator | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.default_generators[torch.cuda.current_device()]


GLOBAL_RNGS: Sequence[GlobalRng] = (_Torch(), _Python(), _Numpy(), _Cuda())


def seed_global_rngs(value: int) -> None:
    """Start the process-wide generators of torch, numpy and `random` anew.

    Args:
        value: 0 … 2**64-1.
    """
    for rng in GLOBAL_RNGS:
        rng.seed(value)


def states_after(value: int) -> Sequence[Any]:
    """The states in which `seed_global_rngs` leaves the generators. They are to be put back afterwards."""
    return _states_after(value, _mersenne_twister(), _cudas_generator())


@lru_cache(maxsize=4)
def _states_after(value: int, *_: Any) -> Sequence[Any]:
    seed_global_rngs(value)
    return [rng.state() for rng in GLOBAL_RNGS]


@contextmanager
def preserve_global_rngs(thread: int | None = None, advice: str = "") -> Iterator[None]:
    """Put the process-wide generators back afterwards, whatever happens inside.

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
