"""Which stand-in a tensor is on.

[Note: marks] Every tensor of a rehearsal is an ordinary CPU tensor. An attribute of its storage, the mark, says that
its memory stands for memory of a GPU. Storages keep their Python object, and thus the attribute, as long as they live;
views share them; and everything written in C++ (kernels, the autograd engine, DDP's reducer, collectives, NumPy) sees
CPU memory and works. A storage is marked at most once, and its bytes count as used on that device until it is freed,
adjusted after each resize.

[Note: garbage] In older releases of torch, if only garbage refers to a storage in Python, such as what `torch.save`
leaves behind, the garbage collector clears the storage's Python object, although tensors still hold the storage and
will return that object again. It is therefore untracked; reference counting frees it all the same.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.comm.torch_version import forgets_of_storages

__all__ = [
    "Ledger",
    "Tally",
    "Usage",
    "ledger",
    "mark",
    "mark_of",
    "mark_storage",
    "note_on",
    "real_device",
    "storage_of",
]

_MARK = "_lockstep_device_index"

_read_device = torch._C.TensorBase.device.__get__
_read_storage = torch._C.TensorBase.untyped_storage
_hides = forgets_of_storages(torch.__version__)


def real_device(tensor: torch.Tensor) -> torch.device:
    """The device that the tensor's memory is really on."""
    device: torch.device = _read_device(tensor)
    return device


def storage_of(tensor: torch.Tensor) -> Any:
    """The tensor's storage: that of its values if sparse, of its first part if composed of tensors; None if none."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names = flatten()[0]
        return storage_of(getattr(tensor, names[0])) if names else None
    try:
        return _read_storage(tensor)
    except (NotImplementedError, RuntimeError):
        pass
    try:
        return _read_storage(tensor._values() if tensor.is_sparse else tensor.values())
    except (NotImplementedError, RuntimeError, AttributeError):
        return None


def mark_of(tensor: torch.Tensor) -> int | None:
    """Index of the stand-in that the tensor is on; None if it is in host memory."""
    return getattr(storage_of(tensor), _MARK, None)


def mark(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Mark the tensor's newly allocated memory as being on stand-in `index`, and return the tensor.

    Raises:
        torch.OutOfMemoryError: the device does not have that much memory left.
    """
    mark_storage(storage_of(tensor), index)
    return tensor


def mark_storage(storage: Any, index: int) -> None:
    """`mark` for a storage; one that already has a mark keeps it."""
    if storage is not None and getattr(storage, _MARK, None) is None and storage.device.type == "cpu":
        ledger.add(storage, index)
        note_on(storage, _MARK, index)


def note_on(storage: Any, name: str, value: object) -> None:
    """Set an attribute that lasts as long as the storage. See [Note: garbage]."""
    setattr(storage, name, value)
    if _hides:
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(storage))


@dataclass
class Tally:
    """A quantity in use.

    Attributes:
        now: current amount.
        peak: maximum since the last reset.
        ever: sum of all amounts added since the last reset, freed or not.
    """

    now: int = 0
    peak: int = 0
    ever: int = 0

    def add(self, amount: int) -> None:
        """Add an amount, which may be negative."""
        self.now += amount
        self.peak = max(self.peak, self.now)
        self.ever += max(amount, 0)


@dataclass
class Usage:
    """Memory in use on a stand-in: bytes, and blocks (storages)."""

    num_bytes: Tally = field(default_factory=Tally)
    blocks: Tally = field(default_factory=Tally)


class _Tracked(weakref.ref[Any]):
    """Weak reference to a counted storage, with its device and the bytes counted for it."""

    index: int
    num_bytes: int
    key: int


class Ledger:
    """Memory in use on all stand-ins of this process.

    Attributes:
        limit_bytes: memory of each device; 0 for no limit.
    """

    def __init__(self) -> None:
        self.limit_bytes = 0
        self._lock = threading.RLock()
        self._usages: dict[int, Usage] = {}
        # By the `id` of the storage.
        self._tracked: dict[int, _Tracked] = {}

    def of(self, index: int) -> Usage:
        """Memory in use on a device; read only."""
        return self._usages.setdefault(index, Usage())

    def add(self, storage: Any, index: int) -> None:
        """Count the bytes of a storage until it is freed. Raises torch.OutOfMemoryError if they exceed the limit."""
        num_bytes = storage.nbytes()
        with self._lock:
            self._take(index, num_bytes)
            self.of(index).blocks.add(1)
            tracked = _Tracked(storage, self._forget)
            tracked.index, tracked.num_bytes, tracked.key = index, num_bytes, id(storage)
            self._tracked[tracked.key] = tracked

    def resize(self, storage: Any, num_bytes: int) -> None:
        """Count `num_bytes` for a storage from now on, if it is counted at all."""
        with self._lock:
            tracked = self._tracked.get(id(storage))
            if tracked is not None:
                self._take(tracked.index, num_bytes - tracked.num_bytes)
                tracked.num_bytes = num_bytes

    def _take(self, index: int, num_bytes: int) -> None:
        tally = self.of(index).num_bytes
        if self.limit_bytes and num_bytes > 0 and tally.now + num_bytes > self.limit_bytes:
            raise torch.OutOfMemoryError(self._complaint(index, tally.now, num_bytes))
        tally.add(num_bytes)

    def _forget(self, tracked: Any) -> None:
        with self._lock:
            del self._tracked[tracked.key]
            usage = self.of(tracked.index)
            usage.num_bytes.add(-tracked.num_bytes)
            usage.blocks.add(-1)

    def _complaint(self, index: int, used: int, num_bytes: int) -> str:
        free = self.limit_bytes - used
        return (
            f"CUDA out of memory. Tried to allocate {_size(num_bytes)}. GPU {index} has a total capacity of "
            f"{_size(self.limit_bytes)} of which {_size(free)} is free; {_size(used)} is in use by this process. "
            f"(Rehearsal: `--memory` set that capacity for the stand-in of cuda:{index}.)"
        )

    def reset_peak(self, index: int) -> None:
        """Reset the peaks of a device to what is in use now."""
        with self._lock:
            for tally in (self.of(index).num_bytes, self.of(index).blocks):
                tally.peak = tally.now

    def reset_total(self, index: int) -> None:
        """Reset the totals of a device to what is in use now."""
        with self._lock:
            for tally in (self.of(index).num_bytes, self.of(index).blocks):
                tally.ever = tally.now


def _size(num_bytes: int) -> str:
    amount = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"


ledger = Ledger()
