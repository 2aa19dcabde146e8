"""Which stand-in a tensor lies on.

[Note: marks] Every tensor of a rehearsal is an ordinary CPU tensor. That its memory stands for memory of a GPU is an
attribute of its storage. Storages keep their Python object, and with it the attribute, as long as they live; views
share them; and everything written in C++ (kernels, the autograd engine, DDP's reducer, collectives, NumPy) sees CPU
memory and works. A mark is set once in a storage's life, and its bytes count as used on that device until it dies, as
many as there are after each resize.

[Note: garbage] With an older torch the collector takes a storage for garbage that only garbage refers to, such as what
`torch.save` leaves behind, and empties its Python object, though tensors have the storage and will show it again. What
the collector does not know it leaves alone; what dies is given back without it.
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
        return _read_storage(tensor._values() if tensor.is_sparse else tensor.values())
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
        note_on(storage, _MARK, index)


def note_on(storage: Any, name: str, value: object) -> None:
    """Set an attribute of a storage that stays for as long as the storage does. See [Note: garbage]."""
    setattr(storage, name, value)
    if _hides:
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(storage))


@dataclass
class Tally:
    """A quantity in use.

    Attributes:
        now: at present.
        peak: the most since it was reset.
        ever: all that was ever added, given back or not, since it was reset.
    """

    now: int = 0
    peak: int = 0
    ever: int = 0

    def add(self, amount: int) -> None:
        """Use so much more, or less."""
        self.now += amount
        self.peak = max(self.peak, self.now)
        self.ever += max(amount, 0)


@dataclass
class Usage:
    """What a stand-in holds: bytes, and the blocks (storages) that they are in."""

    num_bytes: Tally = field(default_factory=Tally)
    blocks: Tally = field(default_factory=Tally)


class _Tracked(weakref.ref[Any]):
    """A storage that counts, and what it counts for."""

    index: int
    num_bytes: int
    key: int


class Ledger:
    """What is in use on every stand-in of this process.

    Attributes:
        limit_bytes: of each device; 0 for none.
    """

    def __init__(self) -> None:
        self.limit_bytes = 0
        self._lock = threading.RLock()
        self._usages: dict[int, Usage] = {}
        # By the `id` of the storage.
        self._tracked: dict[int, _Tracked] = {}

    def of(self, index: int) -> Usage:
        """What is in use on a device; not to be changed."""
        return self._usages.setdefault(index, Usage())

    def add(self, storage: Any, index: int) -> None:
        """Count the bytes of a storage until it dies."""
        num_bytes = storage.nbytes()
        with self._lock:
            self._take(index, num_bytes)
            self.of(index).blocks.add(1)
            tracked = _Tracked(storage, self._forget)
            tracked.index, tracked.num_bytes, tracked.key = index, num_bytes, id(storage)
            self._tracked[tracked.key] = tracked

    def resize(self, storage: Any, num_bytes: int) -> None:
        """Count `num_bytes` for a storage from now on, if it counts."""
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
        """Forget the peaks; the next ones count from what is in use now."""
        with self._lock:
            for tally in (self.of(index).num_bytes, self.of(index).blocks):
                tally.peak = tally.now

    def reset_total(self, index: int) -> None:
        """Forget what was ever added, but for what is in use now."""
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
