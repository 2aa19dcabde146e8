"""Shared memory in which workers hand over batches, and which they use again.

For every tensor of every batch a worker of torch's makes a file in /dev/shm, which the kernel fills with zeros page by
page, and sends its descriptor over a socket of its own. Here a worker has some buffers, which stay mapped on both
sides. A `BufferPool` in the worker takes a free one for a tensor and sends its number; the `BufferReader` in the
training process makes the tensor over that memory, and says when it is gone. Buffers are segments (`shm/segment.py`),
so the size of /dev/shm does not limit them.

[Note: used again] What a buffer holds may be overwritten when nobody can read it any more: in the training process,
when no tensor, view or array over it is left, which the memory of torch's storage tells, and in the worker, too, where
a dataset may keep what it has returned. Then the training process writes FREE into the buffer's word of the control
segment, and the worker reads it there before it takes the buffer again. A process that the training process has forked
meanwhile may still read what it inherited, and of that nobody tells; so a buffer that was in use during a fork is
ABANDONED: both sides let go of it, and its memory lives for as long as somebody maps it. The same goes for one whose
tensor the worker held during a fork. A process that was forked gives nothing back.

[Note: swapped] `share_memory_` and the queues of torch.multiprocessing put other memory under a storage that lives on.
The array that lay there is gone then, but numpy views of the tensor still point to the old memory. So where an array
goes and its storage does not, the buffer is abandoned, and stays mapped for as long as the storage lives.

[Note: fits] Batches of texts differ in size. A buffer is at most twice as large as what is put into it; one that was of
no use for a while is let go. There are at most 64 of a worker, each a descriptor until it has come back once; whoever
keeps more batches than that gets the others in torch's way.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.errors import SharedMemoryError
from lockstep.shm.segment import Segment
from lockstep.shm.support import lack, segment_folder
from lockstep.shm.sync import fence

__all__ = ["BufferPool", "BufferReader", "Place", "are_buffers_possible"]

_BUFFERS_PER_WORKER = 64
_FREE, _TAKEN, _ABANDONED = 0, 1, 2
_HEADER_BYTES = 64  # of a segment, which belong to itself
_WORD_BYTES = 8
_USELESS_AFTER = 256  # tensors of a worker
_LOOSEST = 2
_SIZES_PER_OCTAVE = 8


def are_buffers_possible() -> bool:
    """Whether this system has shared memory without a name. Local."""
    return lack() is None and segment_folder() is None


class Place(NamedTuple):
    """Where the training process finds the memory of a tensor.

    Attributes:
        handle: of the buffer's segment.
        word: index of the buffer's word in the control segment.
        size_bytes: of the memory, from the beginning of the buffer.
    """

    handle: str
    word: int
    size_bytes: int


@dataclass(eq=False)
class _Buffer:
    """One buffer, as its worker sees it.

    Attributes:
        segment: its memory.
        word: index of its word in the control segment.
        capacity_bytes: what fits.
        used_at: the number of the tensor that was last put into it.
        is_held: a tensor over it is alive in the worker.
        is_out: it was handed over, and has not been seen to come back.
        is_mapped: it has come back once, so the training process has mapped it.
        is_lost: somebody may read it for good, so that it is not used again when it comes back.
    """

    segment: Segment
    word: int
    capacity_bytes: int
    used_at: int
    is_held: bool = False
    is_out: bool = False
    is_mapped: bool = False
    is_lost: bool = False

    @property
    def address(self) -> int:
        """Where what it holds begins."""
        return self.segment.tensor(_HEADER_BYTES, 1).data_ptr()

    def let_go(self, reference: StorageWeakRef, num_forks: int) -> None:
        """The tensor is gone. See [Note: used again] and [Note: swapped]."""
        is_swapped = _keep_if_swapped(self.segment, reference)
        self.is_lost |= is_swapped or num_forks != _num_forks
        self.is_held = False


def _array(segment: Segment, size_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The first bytes of a buffer. torch keeps such an array for as long as it has a tensor over the memory."""
    return np.frombuffer(segment.memory, np.uint8, size_bytes, _HEADER_BYTES)


def _words_of(control: Segment) -> memoryview:
    return control.memory[_HEADER_BYTES:].cast("q")


_num_forks = 0  # of this process since `_count_forks`; another number after each


@cache
def _count_forks() -> None:
    def note() -> None:
        global _num_forks
        _num_forks += 1

    os.register_at_fork(before=note, after_in_parent=note)  # twice: what a thread is handed in between is inherited


# Segments whose tensors have moved elsewhere, each with the storage that was there. See [Note: swapped].
_swapped: list[tuple[Segment, StorageWeakRef]] = []


def _keep_if_swapped(segment: Segment, reference: StorageWeakRef) -> bool:
    is_swapped = not reference.expired()  # type: ignore[no-untyped-call]
    if is_swapped:
        _swapped.append((segment, reference))
    return is_swapped


def _drop_swapped() -> None:
    for each in list(_swapped):  # one by one: others may be added meanwhile
        if each[1].expired():  # type: ignore[no-untyped-call]
            with contextlib.suppress(ValueError):  # another thread was first
                _swapped.remove(each)


class BufferPool:
    """The buffers of one worker process. `control` is the handle of the control segment.

    Raises:
        SharedMemoryError: the memory of the training process cannot be opened from here.
    """

    def __init__(self, control: str, worker: int, num_workers: int) -> None:
        _count_forks()
        segment = Segment.attach(control, size_bytes=_control_bytes(num_workers))
        segment.release()
        self._words = _words_of(segment)
        first = worker * _BUFFERS_PER_WORKER
        self._unused_words = [*range(first + _BUFFERS_PER_WORKER - 1, first - 1, -1)]
        self._buffers: list[_Buffer] = []
        self._by_address: dict[int, _Buffer] = {}
        self._retired: list[str] = []
        self._count = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()  # a dataset may collate in threads of its own

    def new(self, size_bytes: int) -> torch.Tensor | None:
        """Memory of at least one byte for a tensor, in a buffer that is free or new. Local.

        Returns:
            A uint8 tensor, shape (size_bytes,), with any content; None if there are too many buffers, or no memory.
        """
        if os.getpid() != self._pid:
            return None  # a fork of the worker, which shares the buffers and not this object
        with self._lock:
            self._count += 1
            _drop_swapped()
            self._tidy_up()
            free = [each for each in self._buffers if not each.is_held and self._words[each.word] == _FREE]
            fence()  # what the training process has read was read before it wrote FREE
            loosest = max(_LOOSEST * size_bytes, Segment.whole(_segment_bytes(size_bytes)))
            fitting = [each for each in free if size_bytes <= each.capacity_bytes <= loosest]
            buffer = min(fitting, key=lambda each: (each.capacity_bytes, each.word), default=None)
            if buffer is None:
                if not self._unused_words and free:
                    self._retire(min(free, key=lambda each: each.used_at))
                buffer = self._make(size_bytes)
            if buffer is None:
                return None
            buffer.is_held, buffer.used_at = True, self._count
            array = _array(buffer.segment, size_bytes)
            tensor = torch.from_numpy(array)
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            weakref.finalize(array, buffer.let_go, reference, _num_forks).atexit = False
            return tensor

    def send(self, storage: torch.UntypedStorage) -> Place | None:
        """Hand over the memory of a tensor made by `new`, which the training process gives back later. Local.

        Returns:
            Where it lies; None if it is other memory, or was handed over before.
        """
        if os.getpid() != self._pid:
            return None
        with self._lock:
            buffer = self._by_address.get(storage.data_ptr())
            if buffer is None or not buffer.is_held or self._words[buffer.word] != _FREE:
                return None
            self._words[buffer.word] = _TAKEN
            buffer.is_out = True
            return Place(buffer.segment.handle, buffer.word, storage.nbytes())

    def take_back(self, places: list[Place]) -> None:
        """What was to be handed over in these places will not be. Local."""
        words = {place.word for place in places}
        with self._lock:
            for buffer in self._buffers:
                if buffer.word in words:
                    buffer.is_out = False
                    self._words[buffer.word] = _FREE

    def retired(self) -> list[str]:
        """Handles of the buffers that are used no more, each once. Local."""
        with self._lock:
            retired, self._retired = self._retired, []
            return retired

    def _tidy_up(self) -> None:
        for buffer in list(self._buffers):
            state = self._words[buffer.word]
            if state == _FREE and buffer.is_out:
                buffer.is_out, buffer.is_mapped = False, True
                buffer.segment.release()
            is_useless = buffer.is_lost or self._count - buffer.used_at > _USELESS_AFTER
            if state == _ABANDONED or (state == _FREE and not buffer.is_held and is_useless):
                self._retire(buffer)

    def _retire(self, buffer: _Buffer) -> None:
        self._buffers.remove(buffer)
        del self._by_address[buffer.address]
        buffer.segment.release()
        if buffer.is_mapped or (buffer.is_out and self._words[buffer.word] == _FREE):
            self._retired.append(buffer.segment.handle)
        self._words[buffer.word] = _FREE
        self._unused_words.append(buffer.word)

    def _make(self, size_bytes: int) -> _Buffer | None:
        if not self._unused_words:
            return None
        try:
            segment = Segment.create(_segment_bytes(size_bytes))
        except SharedMemoryError:
            return None
        buffer = _Buffer(segment, self._unused_words.pop(), segment.size_bytes - _HEADER_BYTES, self._count)
        self._buffers.append(buffer)
        self._by_address[buffer.address] = buffer
        return buffer


class BufferReader:
    """What the training process reads of the buffers of one loader's workers.

    Attributes:
        control: handle of the control segment, for the workers.

    Raises:
        SharedMemoryError: there is no memory for the control segment.
    """

    def __init__(self, num_workers: int) -> None:
        _count_forks()
        self._control = Segment.create(_control_bytes(num_workers), is_sparse=True)
        self.control = self._control.handle
        self._words = _words_of(self._control)
        self._segments: dict[str, Segment] = {}

    def storage(self, place: Place) -> torch.UntypedStorage:
        """The memory at a place, which is given back when nothing is left over it. Local, in any thread.

        Raises:
            SharedMemoryError: it cannot be mapped.
        """
        _drop_swapped()
        segment = self._segments.get(place.handle)
        if segment is None:
            segment = Segment.attach(place.handle)
            segment.release()
            self._segments[place.handle] = segment
        array = _array(segment, place.size_bytes)
        storage = torch.from_numpy(array).untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        weakref.finalize(array, self._give_back, place, _num_forks, os.getpid(), reference, segment).atexit = False
        return storage

    def forget(self, handles: list[str]) -> None:
        """Let go of buffers that their workers have retired. Local."""
        for handle in handles:
            self._segments.pop(handle, None)

    def close(self) -> None:
        """Let go of all buffers, which live on where something is left over them. Local."""
        self._control.release()
        self._segments.clear()

    def _give_back(self, place: Place, num_forks: int, pid: int, reference: StorageWeakRef, segment: Segment) -> None:
        """See [Note: used again] and [Note: swapped]."""
        if os.getpid() != pid:
            return
        is_swapped = _keep_if_swapped(segment, reference)
        fence()
        if num_forks == _num_forks and not is_swapped:
            self._words[place.word] = _FREE
        else:
            self._segments.pop(place.handle, None)
            self._words[place.word] = _ABANDONED


def _segment_bytes(size_bytes: int) -> int:
    """What a buffer for so many bytes is made with."""
    unit = max(4096, (1 << size_bytes.bit_length()) // (2 * _SIZES_PER_OCTAVE))
    return _HEADER_BYTES + -(-size_bytes // unit) * unit


def _control_bytes(num_workers: int) -> int:
    return _HEADER_BYTES + num_workers * _BUFFERS_PER_WORKER * _WORD_BYTES
