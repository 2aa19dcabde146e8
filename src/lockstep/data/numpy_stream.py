"""Sets the stream of numpy's process-wide generator aside while samples are fetched in the training process.

`np.random.get_state` and `set_state` copy a state number by number, and take as long together as seeding 20 samples.
numpy's generator tells where its state lies in memory, and there it is copied at once.

[Note: the second normal number] numpy's old generator makes normal numbers in pairs, and keeps the second one beside
its state. Whether there is one, only `get_state` says. So one is drawn: if the state stays as it was, this was the
kept one, and now its value is known; else there was none, and the state was copied before.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any, cast

import numpy as np

from lockstep.data import deferred_numpy

__all__ = ["NumpyStream"]

_KEY_BYTES = 624 * 4
_STATE_BYTES = _KEY_BYTES + 4  # the numbers, and the position among them


class NumpyStream:
    """Where numpy's process-wide generator was. Leaves it anywhere: it is to be seeded now."""

    def __init__(self) -> None:
        deferred_numpy.settle()
        self._kept: float | None = None  # the second normal number
        generator = _generator_in_memory()
        if generator is None:
            self._holder = None
            self._state: Any = np.random.get_state(legacy=False)
            return
        self._holder = deferred_numpy.holder_of(generator)
        self._state = _memory_of(generator)
        normal = np.random.standard_normal()
        if _memory_of(generator) == self._state:
            self._kept = normal

    def put_back(self) -> None:
        """Go on from there."""
        deferred_numpy.drop()
        if self._holder is None:
            np.random.set_state(self._state)
            return
        generator, module = self._holder.generator, cast("Any", np.random)
        module.set_bit_generator(generator)  # The normal number that samples may have left is gone.
        with generator.lock:
            ctypes.memmove(generator.ctypes.state_address, self._state, _STATE_BYTES)
        if self._kept is not None:
            np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": self._kept})


def _generator_in_memory() -> Any:
    """The process-wide generator; None where it is of another kind, or its memory is laid out in another way."""
    find = getattr(np.random, "get_bit_generator", None)  # since numpy 1.24
    generator = None if find is None else find()
    return generator if type(generator) is np.random.MT19937 and _is_as_known() else None


def _memory_of(generator: Any) -> bytes:
    with generator.lock:
        return ctypes.string_at(generator.ctypes.state_address, _STATE_BYTES)


@cache
def _is_as_known() -> bool:
    """Whether this release of numpy keeps the state as the numbers and the position behind them."""
    example = np.random.MT19937(1)
    example.random_raw(5)
    memory, state = _memory_of(example), example.state["state"]
    key, position = state["key"], state["pos"]
    return memory == key.astype(np.uint32).tobytes() + int(position).to_bytes(4, sys.byteorder)
