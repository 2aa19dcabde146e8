"""A stream of records from one rank to another, through a ring buffer in shared memory.

One rank writes, one reads, without locks. Layout in bytes, integers 64 bit little endian::

    0        bytes written since the beginning (by the writer)             64
    64       bytes read since the beginning, bytes settled (by the reader) 64
    128      the ring                                                      capacity

    record, at a multiple of 64 bytes:
    0        its size with padding, then seven fields of its kind          64
    64       payload

[Note: no record wraps] A record is contiguous. One that does not fit before the end of the ring begins at its start,
and a record of kind 0 fills the gap. So no record may be larger than half the ring: then an empty ring has room for it
wherever the writer is.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lockstep.errors import SegmentDamaged
from lockstep.shm.control_blocks import damage_text
from lockstep.shm.segment import Segment
from lockstep.shm.sync import fence

__all__ = ["Fields", "Payload", "RingReader", "RingWriter", "copy_bytes", "ring_bytes"]

_HEADER = struct.Struct("8q")
_RECORD_UNIT = _HEADER.size
_GAP = 0
_RING_START = 128

Fields = tuple[int, int, int, int, int, int, int]


class Payload(NamedTuple):
    """The payload of a record, in place in the ring. A tensor view would be several times as expensive to create."""

    address: int
    num_bytes: int

    def read(self) -> bytes:
        """A copy as bytes."""
        return ctypes.string_at(self.address, self.num_bytes)

    def clone(self) -> torch.Tensor:
        """A copy as a uint8 tensor of shape (num_bytes,)."""
        copy = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")
        copy_bytes(self, copy)
        return copy


def copy_bytes(source: torch.Tensor | Payload, target: torch.Tensor) -> int:
    """Copy memory, in this thread only.

    torch would split a copy of tens of KiB among its threads, which costs milliseconds if there are few cores.

    Args:
        source: contiguous, uint8, shape (n,); or the payload of a ring's record.
        target: contiguous, uint8, not overlapping.

    Returns:
        The number of bytes, n.

    Raises:
        ValueError: the target is smaller.
    """
    if isinstance(source, Payload):
        address, num_bytes = source
    else:
        address, num_bytes = source.data_ptr(), source.numel()
    if target.numel() < num_bytes:
        raise ValueError(f"{num_bytes} bytes do not fit into {target.numel()}")
    ctypes.memmove(target.data_ptr(), address, num_bytes)
    return num_bytes


def ring_bytes(capacity: int) -> int:
    """Bytes that a ring of `capacity` bytes takes in a segment."""
    return _RING_START + capacity


@dataclass(frozen=True)
class _RingMemory:
    """The location of a ring."""

    words: memoryview  # of the whole segment, 64 bit each
    data: memoryview  # the ring, as bytes
    tensor: torch.Tensor  # the ring, as uint8, shape (capacity,)
    address: int  # of the ring
    written: int  # index of the word that counts the bytes written
    read: int
    settled: int


def _map(segment: Segment, start: int, capacity: int) -> _RingMemory:
    first = start + _RING_START
    tensor = segment.tensor(first, capacity)
    return _RingMemory(
        segment.memory.cast("q"),
        segment.memory[first : first + capacity],
        tensor,
        tensor.data_ptr(),
        start // 8,
        start // 8 + 8,
        start // 8 + 9,
    )


class RingWriter:
    """The writing end.

    Args:
        segment: the segment that contains the ring.
        start: offset of the ring, a multiple of 64.
        capacity: size of the ring in bytes, a power of two.

    Attributes:
        largest_payload: maximum payload of a record in bytes.
    """

    def __init__(self, segment: Segment, start: int, capacity: int) -> None:
        self._memory = _map(segment, start, capacity)
        self._capacity = capacity
        self._written = 0
        self.largest_payload = capacity // 2 - _RECORD_UNIT

    def write(self, fields: Fields, payload: torch.Tensor | None = None) -> bool:
        """Write a record if there is room for it now. Local.

        Args:
            fields: its kind, above 0, and six more numbers.
            payload: uint8 tensor of shape (n,), n at most `largest_payload`.

        Returns:
            Whether it was written.
        """
        num_bytes = 0 if payload is None else payload.numel()
        size = _RECORD_UNIT + -(-num_bytes // _RECORD_UNIT) * _RECORD_UNIT
        memory, capacity = self._memory, self._capacity
        offset = self._written % capacity
        gap = capacity - offset if size > capacity - offset else 0
        if self._written + gap + size - memory.words[memory.read] > capacity:
            return False
        if gap:
            _HEADER.pack_into(memory.data, offset, gap, _GAP, 0, 0, 0, 0, 0, 0)
            offset = 0
        _HEADER.pack_into(memory.data, offset, size, *fields)
        if payload is not None and num_bytes:
            start = offset + _RECORD_UNIT
            copy_bytes(payload, memory.tensor[start : start + num_bytes])
        self._written += gap + size
        fence()
        memory.words[memory.written] = self._written
        return True

    @property
    def settled(self) -> int:
        """The number that the reader last published by `settle`."""
        return self._memory.words[self._memory.settled]


class RingReader:
    """The reading end; for the arguments see `RingWriter`."""

    def __init__(self, segment: Segment, start: int, capacity: int) -> None:
        self._memory = _map(segment, start, capacity)
        self._capacity = capacity
        self._read = 0
        self._size = 0
        self._offset = 0

    def read(self) -> Fields | None:
        """The fields of the next record, or None if there is none yet. Local. Call `advance` afterwards.

        Raises:
            SegmentDamaged: no writer produces such a record.
        """
        memory = self._memory
        while memory.words[memory.written] != self._read:
            fence()
            self._offset = self._read % self._capacity
            header = _HEADER.unpack_from(memory.data, self._offset)
            self._size = header[0]
            if not 0 < self._size <= self._capacity - self._offset or self._size % _RECORD_UNIT:
                raise SegmentDamaged(damage_text(f"a ring has a record of {self._size} bytes"))
            if header[1] != _GAP:
                return header[1:]
            # A gap must end at the ring's end. Any other would make this loop for ever.
            if self._offset == 0 or self._size != self._capacity - self._offset:
                raise SegmentDamaged(damage_text(f"a ring has a gap of {self._size} bytes at {self._offset}"))
            self.advance()
        return None

    def payload(self, num_bytes: int) -> Payload:
        """The first bytes of the record's payload. Valid until `advance`.

        Raises:
            SegmentDamaged: the payload is shorter.
        """
        if not 0 <= num_bytes <= self._size - _RECORD_UNIT:
            raise SegmentDamaged(damage_text(f"a record of {self._size} bytes has a payload of {num_bytes}"))
        return Payload(self._memory.address + self._offset + _RECORD_UNIT, num_bytes)

    def advance(self) -> None:
        """Return the record's room to the writer."""
        self._read += self._size
        fence()
        self._memory.words[self._memory.read] = self._read

    def settle(self, total_bytes: int) -> None:
        """Publish to the writer how many of the bytes read so far need no memory here any more."""
        self._memory.words[self._memory.settled] = total_bytes
