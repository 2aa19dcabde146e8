"""Sleeping until a word of shared memory changes: Linux's futex.

[Note: missed wake-ups] A rank that is about to sleep announces it in a word next to the one that it waits for, and
checks once more. A rank that changes the word then reads that other word, and wakes the sleeper. A processor may
execute that read before the store has left the core, which takes some tens of nanoseconds, while the sleeper still has
a system call ahead of it. Should it happen nevertheless, the sleeper notices 2 ms later: its first sleep is no longer
than that (`MISSED_AFTER_S` in `sync.py`), and then it checks once more. By then, whoever read too early has stored, and
whoever comes later reads that somebody sleeps. So if nothing has changed, the rank continues to sleep without writing
anything, for as long as needed; after a wake-up it starts over.
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
    """Lets threads sleep on the words of a piece of shared memory, and wakes them.

    Args:
        words: the memory as 64-bit words, writable.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words  # keeps the memory mapped
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(words))

    @staticmethod
    @functools.cache
    def is_supported() -> bool:
        """Whether it works here: a sandbox may block the call, and its number is known for some processors only."""
        if _syscall is None or sys.platform != "linux" or _number is None or sys.byteorder != "little":
            return False
        word = ctypes.c_uint64()
        return bool(_syscall(_number, ctypes.byref(word), _WAKE, 1, None, None, 0) == 0)

    def sleep(self, index: int, seen: int, timeout_s: float) -> None:
        """Sleep until woken, if word `index` still is `seen`. Local; may return early without reason.

        Args:
            index: index of the word.
            seen: the value that the caller has read.
            timeout_s: the longest sleep, in seconds.
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
        """Wake all threads that sleep on word `index`. Local."""
        _syscall(_number, ctypes.c_void_p(self._address + 8 * index), _WAKE, _EVERYBODY, None, None, 0)
