"""How far each rank is in the cases, reported without using the backend that is being tested.

A file with one 8-byte slot per rank, mapped by all of them. Each rank writes how far it is and whether the case passed,
and polls until all ranks are as far. If ranks died, the file shows afterwards in which case each of them was.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

__all__ = ["CaseProgress", "create"]

_SLOT = struct.Struct("<q")
_POLL_S = 0.0002


def create(path: str, world_size: int) -> None:
    """Create the file; called before the ranks start."""
    with open(path, "wb") as file:
        file.write(bytes(_SLOT.size * world_size))


class CaseProgress:
    """One rank's view of the file.

    A slot holds 2 · (cases finished) + (1 if the last of them failed on that rank). A slot is written by one rank and
    aligned, so reads are atomic.
    """

    def __init__(self, path: str, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()

    def finish(self, number: int, *, failed: bool, deadline_s: float) -> bool:
        """Report that case `number` (from 0) has finished here and wait for the others; returns whether any failed.

        Raises:
            TimeoutError: a rank did not finish it within `deadline_s`; names those that did not.
        """
        self._write(2 * (number + 1) + failed)
        deadline = time.monotonic() + deadline_s
        while True:
            values = [self._read(rank) for rank in range(self._world_size)]
            if all(value // 2 > number for value in values):
                return any(value % 2 for value in values if value // 2 == number + 1)
            if time.monotonic() > deadline:
                missing = [rank for rank, value in enumerate(values) if value // 2 <= number]
                raise TimeoutError(f"ranks {missing} did not finish the case within {deadline_s:g} s of this one")
            time.sleep(_POLL_S)

    def _read(self, rank: int) -> int:
        (value,) = _SLOT.unpack_from(self._memory, rank * _SLOT.size)
        return int(value)

    def _write(self, value: int) -> None:
        _SLOT.pack_into(self._memory, self._rank * _SLOT.size, value)
