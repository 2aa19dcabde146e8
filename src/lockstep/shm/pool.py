"""Chunks of shared memory through which a rank streams large messages to all others.

The sender owns the pool: it fills a free chunk and references it in a record of a ring; the receiver copies the data
and returns the chunk by a flag. A receiver maps the pool when it first gets a record that references it. Layout in
bytes::

    0        header of the segment (nonce)           64
    64       one cache line for each chunk: 1 when the receiver has handed it back
    4096     the chunks                              CHUNK_BYTES each
"""

from __future__ import annotations

import torch

from lockstep.shm.segment import PAGE_BYTES, Segment
from lockstep.shm.sync import fence

__all__ = ["CHUNK_BYTES", "Pool", "PoolView"]

CHUNK_BYTES = 512 << 10
_NUM_CHUNKS = 8
_SIZE_BYTES = PAGE_BYTES + _NUM_CHUNKS * CHUNK_BYTES
_LINE_WORDS = 8
_HANDED_BACK = 1


class _Chunks:
    """The view of a pool common to both ends."""

    def __init__(self, segment: Segment) -> None:
        self._words = segment.memory.cast("q")
        self._data = segment.tensor(PAGE_BYTES, _NUM_CHUNKS * CHUNK_BYTES)

    def view(self, chunk: int, num_bytes: int) -> torch.Tensor:
        """The first bytes of a chunk: uint8, shape (num_bytes,).

        Raises:
            ValueError: the pool has no such chunk.
        """
        if not (0 <= chunk < _NUM_CHUNKS and 0 <= num_bytes <= CHUNK_BYTES):
            raise ValueError(f"chunk {chunk} with {num_bytes} bytes")
        start = chunk * CHUNK_BYTES
        return self._data[start : start + num_bytes]


class Pool(_Chunks):
    """The sender's end of a pool.

    Raises:
        SharedMemoryError: there is no memory for it.

    Attributes:
        handle: what a receiver passes to `PoolView`.
    """

    def __init__(self) -> None:
        self._segment = Segment.create(_SIZE_BYTES)
        super().__init__(self._segment)
        self.handle = self._segment.handle
        self._free = list(range(_NUM_CHUNKS))
        self._lent: set[int] = set()
        self._unclaimed: set[int] = set()

    def take(self, *, unclaimed: bool) -> int | None:
        """Take a free chunk; None if there is none.

        Args:
            unclaimed: the receiver has not requested the message yet and may keep the chunk for long. Such messages get
                no more than half of the pool, so that the others always make progress.
        """
        self._reclaim()
        if not self._free or (unclaimed and len(self._unclaimed) >= _NUM_CHUNKS // 2):
            return None
        chunk = self._free.pop()
        self._lent.add(chunk)
        if unclaimed:
            self._unclaimed.add(chunk)
        return chunk

    def _reclaim(self) -> None:
        for chunk in list(self._lent):
            word = (1 + chunk) * _LINE_WORDS
            if self._words[word] == _HANDED_BACK:
                fence()
                self._words[word] = 0
                self._lent.discard(chunk)
                self._unclaimed.discard(chunk)
                self._free.append(chunk)

    def release(self) -> None:
        """Close the file. The memory stays for receivers that have mapped it."""
        self._segment.release()


class PoolView(_Chunks):
    """A receiver's end of a pool.

    Args:
        handle: the handle of a peer's pool.

    Raises:
        SharedMemoryError: it cannot be mapped.
    """

    def __init__(self, handle: str) -> None:
        segment = Segment.attach(handle, size_bytes=_SIZE_BYTES)
        super().__init__(segment)
        segment.release()

    def hand_back(self, chunk: int) -> None:
        """Return the chunk to the sender."""
        fence()
        self._words[(1 + chunk) * _LINE_WORDS] = _HANDED_BACK
