"""Sleeping until a word of shared memory changes: Linux's futex.

[Note: missed wake-ups] Who wants to sleep says so in a word beside the one that it waits for, and looks once more; who
changes the word looks there behind its store, and wakes. A processor may let that look pass the store, for as long as
the store takes to leave its core: some tens of nanoseconds, while the sleeper still has a system call before it. Should
it happen nevertheless, the sleeper wakes up by itself after `timeout_s`, 2 ms at first and half a second at most: late,
not lost.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import struct
import sys

from lockstep import libc

__all__ = ["Futex"]

_NUMBERS = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "arm64": 98, "ppc64le": 221, "riscv64": 98}
_WAIT, _WAKE = 0, 1
_EVERYBODY = 1 << 30
_LOW_HALF = 0xFFFFFFFF
_TIME = struct.Struct("@qq")

_syscall = libc.function("syscall")
if _syscall is not None:
    _syscall.restype = ctypes.c_long
_number = _NUMBERS.get(platform.machine())


class Futex:
    """The words of a piece of shared memory, to sleep on.

    Args:
        words: the memory as 64-bit words, writable.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words  # keeps the memory mapped
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(words))

    @staticmethod
    @functools.cache
    def is_supported() -> bool:
        """Whether it works here: a sandbox may lack the call, and of other processors its number is not known."""
        if _syscall is None or sys.platform != "linux" or _number is None or sys.byteorder != "little":
            return False
        word = ctypes.c_uint64()
        return bool(_syscall(_number, ctypes.byref(word), _WAKE, 1, None, None, 0) == 0)

    def sleep(self, index: int, seen: int, timeout_s: float) -> None:
        """Sleep until woken, if word `index` still is `seen`. Local; may return early for no reason.

        Args:
            index: of the word.
            seen: what it was.
            timeout_s: not longer than this.
        """
        limit = _TIME.pack(*divmod(int(timeout_s * 1e9), 10**9))
        _syscall(
            _number,
            ctypes.c_void_p(self._address + 8 * index),
            _WAIT,
            ctypes.c_uint32(seen & _LOW_HALF),
            limit,
            None,
            0,
        )

    def wake(self, index: int) -> None:
        """Wake all that sleep on word `index`. Local."""
        _syscall(_number, ctypes.c_void_p(self._address + 8 * index), _WAKE, _EVERYBODY, None, None, 0)
