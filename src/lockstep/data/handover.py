"""Batches on their way from a worker process to the training process.

A worker of torch's puts its batch into a queue, whose own thread pickles it and moves its tensors to shared memory.
What fails there (a full /dev/shm, an object that cannot be pickled) is printed by that thread and told to nobody, and
the training process waits for ever. So a worker packs its batch where an error is torch's to carry over: as it
fetches. Tensors travel in buffers that are used again (`buffers.py`), small ones by value.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import io
import itertools
import os
import pickle
import re
import weakref
from collections.abc import Callable, Collection, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import get_worker_info

from lockstep.data.buffers import BufferPool, BufferReader, Place, are_buffers_possible
from lockstep.data.source import SampleSource, TensorSource, identity
from lockstep.errors import DataError, SharedMemoryError
from lockstep.torch_private.loader import stack_into
from lockstep.tree import tensors_in

__all__ = ["PackingSource", "starting_workers"]

_SHARED_MEMORY = "/dev/shm"
_BY_VALUE_BYTES = 16 * 1024
# What torch says when it cannot make a file there.
_FULL_PHRASES = (
    "unable to allocate shared memory",
    "No space left on device",
    "unable to mmap",
    "unable to resize file",
)


# By the number of a loader's iterator, which its workers are told: what this process reads of their buffers.
_readers: dict[int, BufferReader] = {}
_count = itertools.count(1).__next__


class _Packed:
    """A pickled batch, which comes out of the queue as the batch itself."""

    def __init__(self, content: bytes, reader: int, retired: list[str]) -> None:
        self._arguments = content, reader, retired

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return _unpack, self._arguments


def _unpack(content: bytes, reader: int, retired: list[str]) -> Any:
    if retired and reader in _readers:
        _readers[reader].forget(retired)
    return pickle.loads(content)


def _storage_in_buffer(reader: int, *place: Any) -> torch.UntypedStorage:
    found = _readers.get(reader)
    if found is None:  # the iterator is gone, and a thread of torch's still empties its queue
        return torch.empty(Place(*place).size_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
    return found.storage(Place(*place))


def _storage_of_bytes(content: bytes) -> torch.UntypedStorage:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).untyped_storage()


class _BatchPickler(ForkingPickler):
    """Pickles as torch's queues do, and hands over the memory of tensors in buffers, or by value if it is small.

    Does not lose that a tensor is the lazy conjugate or negative of its memory.

    Args:
        pool: of buffers; None where there are none, and all goes in torch's way.
        reader: number of their reader in the training process.
        storages: addresses of the memory to copy into buffers. What lies in one already is handed over there; the rest
            goes in torch's way.

    Attributes:
        places: those in buffers.
    """

    def __init__(self, file: io.BytesIO, pool: BufferPool | None, reader: int, storages: Collection[int]) -> None:
        super().__init__(file)
        self._pool = pool
        self._reader = reader
        self._storages = storages
        self.places: list[Place] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()):
            return identity, (value.resolve_conj().resolve_neg(),)
        if self._pool is None or type(value) is not torch.UntypedStorage or value.device.type != "cpu":
            return NotImplemented
        place = self._pool.send(value)
        if place is None and value.data_ptr() in self._storages:
            size_bytes = value.nbytes()
            if size_bytes <= _BY_VALUE_BYTES:
                return _storage_of_bytes, (ctypes.string_at(value.data_ptr(), size_bytes),)
            copy = self._pool.new(size_bytes)
            if copy is not None:
                ctypes.memmove(copy.data_ptr(), value.data_ptr(), size_bytes)
                place = self._pool.send(copy.untyped_storage())
        if place is None:
            return NotImplemented
        self.places.append(place)
        return _storage_in_buffer, (self._reader, *place)


def _close(reader: int, pid: int) -> None:
    if os.getpid() == pid:
        _readers.pop(reader).close()


class PackingSource:
    """Fetches batches in a worker process, and packs them.

    Made by the training process, which lets go of the buffers when its own copy is gone, and so torch's iterator, which
    holds it.
    """

    def __init__(self, source: SampleSource | TensorSource, num_workers: int) -> None:
        self._source = source
        self._num_workers = num_workers
        self._reader, self._control = 0, ""  # number of the reader, and handle of the control segment, if there are any
        with contextlib.suppress(SharedMemoryError):  # then torch's way may still work
            if are_buffers_possible():
                reader = BufferReader(num_workers)
                self._reader, self._control = _count(), reader.control
                _readers[self._reader] = reader
                weakref.finalize(self, _close, self._reader, os.getpid()).atexit = False

    @property
    def dataset(self) -> Any:
        """The user's."""
        return self._source.dataset

    def __getitems__(self, fetch: Any) -> Any:
        """What becomes the batch in the training process.

        Raises:
            DataError: the batch cannot be sent: /dev/shm is full, or something in it cannot be pickled.
        """
        try:
            self._pool  # noqa: B018  from now on the default collate function stacks there
            batch = self._source.__getitems__(fetch)
        except RuntimeError as error:  # torch's collate function makes tensors in shared memory to begin with
            if _is_full(error):
                raise _full_memory(error) from None
            raise
        try:
            return self._pack(batch)
        except Exception as error:
            if _is_full(error):
                raise _full_memory(error) from None
            raise DataError(
                f"a batch of type {type(batch).__name__} cannot be sent from its worker to the training process "
                f"({error}). Return tensors or plain data from the dataset and collate_fn, or pass num_workers=0"
            ) from None

    @functools.cached_property
    def _pool(self) -> BufferPool | None:
        """The buffers of the worker that this is in; None where it goes in torch's way."""
        worker = get_worker_info()
        if self._reader and worker is not None:
            with contextlib.suppress(SharedMemoryError):  # it cannot be opened from here
                pool = BufferPool(self._control, worker.id, self._num_workers)
                stack_into(pool.new, _BY_VALUE_BYTES)
                return pool
        return None

    def _pack(self, batch: Any) -> _Packed:
        content, pool = io.BytesIO(), self._pool
        pickler = _BatchPickler(content, pool, self._reader, () if pool is None else _mostly_used(batch))
        try:
            pickler.dump(batch)
        except BaseException:
            if pool is not None:
                pool.take_back(pickler.places)
            raise
        return _Packed(content.getvalue(), self._reader, [] if pool is None else pool.retired())


def _mostly_used(batch: Any) -> set[int]:
    """The addresses of the memory of the tensors in a batch, but where these are a small part of a large tensor.

    A view of all of a dataset is not to be copied whole into every batch: torch moves such memory to where it is
    shared, once. The same goes for what is shared already. All else is copied, also what comes a second time: it may be
    memory that a collate function fills anew for each batch.
    """
    found = set()
    for tensor in tensors_in(batch):
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested:
            try:
                storage = tensor.untyped_storage()
                storage.data_ptr()
            except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
                continue
            if 0 < storage.nbytes() <= 2 * tensor.numel() * tensor.element_size() and not storage.is_shared():
                found.add(storage.data_ptr())
    return found


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError | RuntimeError) and any(phrase in str(error) for phrase in _FULL_PHRASES)


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
    """Names the folder that is full where workers cannot start: the semaphores of their queues lie there."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free, _ = _free_and_all_mib()
        raise DataError(
            f"workers cannot start: {error}. {_SHARED_MEMORY}, which holds the semaphores of their queues, has {free} "
            "MiB free. Give the container more (docker run --shm-size=8g), or pass num_workers=0"
        ) from None


def _free_and_all_mib() -> tuple[str, str]:
    with contextlib.suppress(OSError):
        status = os.statvfs(_SHARED_MEMORY)
        free, size = (f"{blocks * status.f_frsize / 2**20:,.0f}" for blocks in (status.f_bavail, status.f_blocks))
        return free, size
    return "no", "no"


def _full_memory(error: Exception) -> DataError:
    """The error for the user. Removes the file that torch leaves when it cannot fill it."""
    left = re.search(r"file <(/torch_[0-9_]+)>", str(error))
    if left is not None:
        with contextlib.suppress(OSError):
            os.unlink(_SHARED_MEMORY + left[1])
    _, size = _free_and_all_mib()
    return DataError(
        f"{_SHARED_MEMORY} ({size} MiB in all) has no room for the next batch, which workers pass on there: {error}. "
        "Lower num_workers or prefetch_factor (each worker keeps that many batches), give the container more (docker "
        "run --shm-size), or pass num_workers=0"
    )
