"""Seeds as a function of (seed, epoch, index), and the process-wide generators that they seed.

See `lockstep.seeding.derive_seed`. Its `purpose` keeps the streams of one (seed, epoch) apart: the shuffle of
an epoch and its augmentations never draw the same numbers.

torch's CPU generator and numpy's legacy one are both Mersenne Twisters that use 32 bits of the seed, so they get
different halves of the hash: with the same half, a dataset that draws from both would see the same stream twice.

The CUDA generator is the current device's, and is seeded only in a process that already uses CUDA: otherwise seeding
would initialise the device in every worker.
"""

from __future__ import annotations

import ctypes
import random
import struct
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
_STATE_BYTES = 625 * 4  # a Mersenne Twister's 624 numbers, and the position among them
_Memory = ctypes.c_char * _STATE_BYTES
_Normal = ctypes.c_char * 16  # whether a normal number is stored, and its value


def make_generator(purpose: bytes, seed: int, epoch: int, index: int = 0) -> torch.Generator:
    """A fresh CPU generator at the start of the stream that `derive_seed` names."""
    return torch.Generator().manual_seed(derive_seed(purpose, seed, epoch, index))


class GlobalRng(Protocol):
    """One process-wide generator. Seeds are 0 … 2**64-1."""

    def seed(self, value: int) -> None:
        """Seed the generator."""

    def state(self) -> Any:
        """The current state. Restore it afterwards: reading it makes numpy's generator drop a stored normal number."""

    def restore(self, state: Any) -> None:
        """Restore a state."""

    def is_at(self, state: Any) -> bool:
        """Whether there was no draw and no seeding since `state`, which `seed` produced, was restored."""


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
    first, second = (ctypes.string_at(each.data_ptr(), each.numel()) for each in (one, other))
    return first == second  # in a third of the time of `torch.equal`


class _Python(GlobalRng):
    """The generator of Python's `random`.

    `random.getstate` converts the state to 625 Python integers, and `setstate` converts it back, which takes longer
    than fetching several cheap samples. CPython stores the state right after the object's header, where it is copied in
    one go. The second normal number of a pair is stored in an attribute.
    """

    def seed(self, value: int) -> None:
        random.seed(value)

    def state(self) -> tuple[Any, ...]:
        known = _known_python()
        if known is None:
            return random.getstate()
        generator, memory = known
        return memory.raw, generator.gauss_next

    def restore(self, state: tuple[Any, ...]) -> None:
        known = _known_python()
        if known is None:
            random.setstate(state)
            return
        generator, memory = known
        memory.raw, generator.gauss_next = state

    def is_at(self, state: tuple[Any, ...]) -> bool:
        return self.state() == state


def _python_memory(generator: random.Random) -> Any:
    return _Memory.from_address(id(generator) + object.__basicsize__)


@cache
def _known_python() -> tuple[Any, Any] | None:
    """`random`'s generator and its memory, if CPython stores position and numbers right after the object's header."""
    generator = getattr(random.getstate, "__self__", None)
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return None
    example = random.Random(1)
    example.getrandbits(5 * 32)
    *numbers, position = example.getstate()[1]
    is_known = _python_memory(example).raw == np.array([position, *numbers], np.uint32).tobytes()
    return (generator, _python_memory(generator)) if is_known else None


class _Numpy(GlobalRng):
    """The generator of `np.random.rand` and similar functions.

    `np.random.get_state` and `set_state` copy the state number by number, and together take as long as seeding 20
    samples. numpy gives the address of a Mersenne Twister's state, where it is copied in one go. Normal numbers are
    made in pairs; the second one is stored in the `RandomState` object, at an offset that is found by experiment.
    """

    def seed(self, value: int) -> None:
        np.random.seed(value >> 32)  # the half that torch's generator drops

    def state(self) -> Any:
        generator = _mersenne_twister()
        if generator is None:
            return np.random.get_state(legacy=False)
        memory, normal = _memory_of(generator)
        with generator.lock:
            return generator, memory.raw, normal.raw

    def restore(self, state: Any) -> None:
        if isinstance(state, dict):
            np.random.set_state(state)
            return
        generator, numbers, kept = state
        if _mersenne_twister() is not generator:  # a sample has replaced it
            np.random.set_bit_generator(generator)  # type: ignore[attr-defined]
        memory, normal = _memory_of(generator)
        with generator.lock:
            memory.raw, normal.raw = numbers, kept

    def is_at(self, state: Any) -> bool:
        return _are_equal(self.state(), state)


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    return bool(np.all(one == other)) if isinstance(one, np.ndarray) else bool(one == other)


def _mersenne_twister() -> Any:
    """numpy's process-wide generator; None if it is of another kind, or its memory has another layout."""
    generator = None if _get_bit_generator is None else _get_bit_generator()
    return generator if type(generator) is np.random.MT19937 and _place_of_normal() is not None else None


@lru_cache(maxsize=4)
def _memory_of(generator: Any) -> tuple[Any, Any]:
    """Memory of numpy's process-wide generator: numbers and position; and its stored normal number with its flag."""
    place = _place_of_normal()
    assert place is not None, "asked for a generator that is not known"
    drawing = getattr(np.random.get_state, "__self__")  # noqa: B009
    return _Memory.from_address(generator.ctypes.state_address), _Normal.from_address(id(drawing) + place)


@cache
def _place_of_normal() -> int | None:
    """Offset of the stored normal number in numpy's `RandomState`; None if this release has another memory layout."""
    generator = np.random.MT19937(1)
    example = np.random.RandomState(generator)
    before = ctypes.string_at(id(example), object_size := type(example).__basicsize__)
    example.standard_normal()
    state = example.get_state(legacy=False)
    after = ctypes.string_at(id(example), object_size)
    place = after.find(struct.pack("d", state["gauss"])) - 8
    numbers = np.append(state["state"]["key"], state["state"]["pos"]).astype(np.uint32).tobytes()
    is_known = (
        type(getattr(np.random.get_state, "__self__", None)) is np.random.RandomState
        and _Memory.from_address(generator.ctypes.state_address).raw == numbers
        and [struct.unpack_from("i", memory, place) for memory in (before, after)] == [(0,), (1,)]
    )
    return place if is_known else None


class _Cuda(GlobalRng):
    """torch's generator on the current GPU, where a dataset may keep data and draw. Its state is None without CUDA."""

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
        elif generator is not None:  # CUDA was initialised in the meantime
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
    """Seed the process-wide generators of torch, numpy and `random`.

    Args:
        value: 0 … 2**64-1.
    """
    for rng in GLOBAL_RNGS:
        rng.seed(value)


def states_after(value: int) -> Sequence[Any]:
    """The generators' states after `seed_global_rngs(value)`."""
    return _states_after(value, _mersenne_twister(), _cudas_generator())


@lru_cache(maxsize=4)
def _states_after(value: int, *_: Any) -> Sequence[Any]:
    with preserve_global_rngs():
        seed_global_rngs(value)
        return [rng.state() for rng in GLOBAL_RNGS]


@contextmanager
def preserve_global_rngs(thread: int | None = None, advice: str = "") -> Iterator[list[Any]]:
    """Restore the process-wide generators on exit, also after an error. Yields their states.

    Args:
        thread: the thread that trains; seeding in any other is an error, except in the main thread. None allows any.
        advice: other remedies, for the error message.

    Raises:
        DataError: another thread may draw from them in the meantime.
    """
    if thread not in (None, threading.get_ident()) and threading.current_thread() is not threading.main_thread():
        raise DataError(
            "batches are fetched in a thread other than the one that created the loader. Torch's, numpy's and "
            "Python's generators belong to all threads, so seeding them here would change the training's random "
            f"numbers (dropout). Create the loader in the thread that fetches{advice}"
        )
    before = [rng.state() for rng in GLOBAL_RNGS]
    try:
        yield before
    finally:
        for rng, state in zip(GLOBAL_RNGS, before, strict=True):
            rng.restore(state)
