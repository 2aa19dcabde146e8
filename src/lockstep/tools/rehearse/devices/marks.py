"""Which stand-in a tensor lies on.

[Note: marks] Every tensor of a rehearsal is an ordinary CPU tensor. That its memory stands for memory of a GPU is an
attribute of its storage. Storages keep their Python object, and with it the attribute, as long as they live; views
share them; and everything written in C++ (kernels, the autograd engine, DDP's reducer, collectives, NumPy) sees CPU
memory and works. A mark is set once in a storage's life, and its bytes count as used on that device until it dies.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch

__all__ = ["Ledger", "ledger", "mark", "mark_of", "mark_storage", "real_device", "storage_of"]

_MARK = "_lockstep_device_index"

_read_device = torch._C.TensorBase.device.__get__
_read_storage = torch._C.TensorBase.untyped_storage


def real_device(tensor: torch.Tensor) -> torch.device:
    """Where its memory really is."""
    device: torch.device = _read_device(tensor)
    return device


def storage_of(tensor: torch.Tensor) -> Any:
    """Its storage, that of its values if it is sparse, that of its first part if it is made of others, or None."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names = flatten()[0]
        return storage_of(getattr(tensor, names[0])) if names else None
    try:
        return _read_storage(tensor)
    except (NotImplementedError, RuntimeError):
        pass
    try:
        return _read_storage(tensor._values())
    except (NotImplementedError, RuntimeError, AttributeError):
        return None


def mark_of(tensor: torch.Tensor) -> int | None:
    """Index of the stand-in that the tensor lies on; None if it lies in host memory."""
    return getattr(storage_of(tensor), _MARK, None)


def mark(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Say that the tensor's memory, which is new, lies on stand-in `index`.

    Raises:
        torch.OutOfMemoryError: the device has not that much left.
    """
    mark_storage(storage_of(tensor), index)
    return tensor


def mark_storage(storage: Any, index: int) -> None:
    """The same for a storage; one that has a mark keeps it."""
    if storage is not None and getattr(storage, _MARK, None) is None and storage.device.type == "cpu":
        ledger.add(storage, index)
        setattr(storage, _MARK, index)


class _Tracked(weakref.ref[Any]):
    """A storage that counts, and what it counts for."""

    index: int
    num_bytes: int


class Ledger:
    """Bytes in use on every stand-in of this process.

    Attributes:
        limit_bytes: of each device; 0 for none.
    """

    def __init__(self) -> None:
        self.limit_bytes = 0
        self._lock = threading.RLock()
        self._used: dict[int, int] = {}
        self._peak: dict[int, int] = {}
        self._count = itertools.count(1)
        self._allocations: dict[int, int] = {}
        self._tracked: set[_Tracked] = set()

    def add(self, storage: Any, index: int) -> None:
        """Count the bytes of a storage until it dies."""
        num_bytes = storage.nbytes()
        with self._lock:
            used = self._used.get(index, 0)
            if self.limit_bytes and used + num_bytes > self.limit_bytes:
                raise torch.OutOfMemoryError(self._complaint(index, used, num_bytes))
            self._used[index] = used + num_bytes
            self._peak[index] = max(self._peak.get(index, 0), used + num_bytes)
            self._allocations[index] = self._allocations.get(index, 0) + 1
            tracked = _Tracked(storage, self._forget)
            tracked.index, tracked.num_bytes = index, num_bytes
            self._tracked.add(tracked)

    def _forget(self, tracked: Any) -> None:
        with self._lock:
            self._tracked.discard(tracked)
            self._used[tracked.index] -= tracked.num_bytes

    def _complaint(self, index: int, used: int, num_bytes: int) -> str:
        free = self.limit_bytes - used
        return (
            f"CUDA out of memory. Tried to allocate {_size(num_bytes)}. GPU {index} has a total capacity of "
            f"{_size(self.limit_bytes)} of which {_size(free)} is free; {_size(used)} is in use by this process. "
            f"(Rehearsal: `--memory` set that capacity for the stand-in of cuda:{index}.)"
        )

    def used(self, index: int) -> int:
        """Bytes in use on a device."""
        return self._used.get(index, 0)

    def peak(self, index: int) -> int:
        """The most that were in use since `reset_peak`."""
        return self._peak.get(index, 0)

    def reset_peak(self, index: int) -> None:
        """Forget the peak; the next one counts from what is in use now."""
        with self._lock:
            self._peak[index] = self.used(index)

    def allocations(self, index: int) -> int:
        """How many storages were ever made on a device."""
        return self._allocations.get(index, 0)


def _size(num_bytes: int) -> str:
    amount = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"


ledger = Ledger()
