"""The mail area holds the rings of a team. It is part of the control segment, which every rank maps from the start.

Layout in bytes, for W ranks::

    0        text of rank 0: what it waits for in a send or receive; then of rank 1, …    TEXT_BYTES each
    …        bell of rank 0, then of rank 1, …: the last ring, and what it is armed for   BELL_BYTES each
    …        ring from rank 0 to rank 0, 0 to 1, …; then from rank 1, …            ring_bytes(capacity) each

[Note: rings from the beginning] Sending is not collective, so the ranks cannot allocate memory together when one of
them starts to send. And a rank may send and leave before its peer gets to its receive, so a message cannot be in memory
that ends with the sender. Hence every pair has a ring, used or not. The rings take 256 KiB for each rank of up to 64;
with more ranks they take 4 KiB for each pair.
"""

from __future__ import annotations

from lockstep.rank_status import read_text, write_text
from lockstep.shm.ring import ring_bytes
from lockstep.shm.segment import Segment

__all__ = ["MailArea"]

_RING_BYTES_PER_RANK = 256 << 10
_SMALLEST_RING_BYTES, _LARGEST_RING_BYTES = 4 << 10, 64 << 10
_TEXT_BYTES = 512
_BELL_BYTES = 64


class MailArea:
    """The part of the control segment for messages between two ranks.

    Args:
        segment: the mapped control segment.
        start: offset of the area, a multiple of 64.
        world_size: number of ranks.

    Attributes:
        capacity: size of each ring in bytes, a power of two.
        num_ranks: number of ranks that have a bell here.
        words: the segment as 64-bit words.
    """

    def __init__(self, segment: Segment, start: int, world_size: int) -> None:
        self.segment = segment
        self.capacity = self.capacity_of(world_size)
        self._memory = segment.memory
        self._start = start
        self.num_ranks = world_size
        self.words = segment.memory.cast("q")

    @staticmethod
    def capacity_of(world_size: int) -> int:
        """Size of each ring in bytes, with that many ranks."""
        share = max(_RING_BYTES_PER_RANK // world_size, 1)
        return max(_SMALLEST_RING_BYTES, min(_LARGEST_RING_BYTES, 1 << share.bit_length() - 1))

    @classmethod
    def size_bytes(cls, world_size: int) -> int:
        """Size of the area in bytes."""
        return world_size * (_TEXT_BYTES + _BELL_BYTES) + world_size**2 * ring_bytes(cls.capacity_of(world_size))

    def ring_start(self, sender: int, receiver: int) -> int:
        """Offset in the segment of the ring from one rank to another."""
        rings = self._start + self.num_ranks * (_TEXT_BYTES + _BELL_BYTES)
        return rings + (sender * self.num_ranks + receiver) * ring_bytes(self.capacity)

    def bell_word(self, local_rank: int) -> int:
        """Index of the word that changes when that rank is woken; the next one tells what its bell is armed for."""
        return (self._start + self.num_ranks * _TEXT_BYTES + local_rank * _BELL_BYTES) // 8

    def publish_waiting(self, rank: int, text: str) -> None:
        """Publish what that rank waits for; empty for nothing. Only called by that rank."""
        write_text(self._memory, self._start + rank * _TEXT_BYTES, _TEXT_BYTES, text)

    def waiting(self, rank: int) -> str:
        """The send or receive that a rank waits in: `recv(float32[3], src=0, tag=0) at …`; empty for none."""
        return read_text(self._memory, self._start + rank * _TEXT_BYTES, _TEXT_BYTES)
