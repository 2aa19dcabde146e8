"""Which device a word means: `cuda`, `cuda:1`, 1, `torch.device("cuda")`, and what a script may say instead.

[Note: visible devices] CUDA reads CUDA_VISIBLE_DEVICES when a process first uses it; `cuda:0` is then the first GPU
that it names. So scripts that give each process one GPU by that variable, and call it `cuda:0`, share none.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from lockstep import env

__all__ = ["CPU", "Devices", "devices"]

CPU = torch.device("cpu")


class Devices:
    """The stand-ins of this process.

    Attributes:
        total: how many GPUs the node pretends to have.
        is_forked: the process that this one was forked from has used CUDA, and so this one cannot.
    """

    def __init__(self) -> None:
        self.total = 0
        self.is_forked = False
        self._used: tuple[int, ...] | None = None
        self._local = threading.local()

    def install(self, total: int) -> None:
        """Pretend so many GPUs. Once."""
        self.total = total
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self.is_forked = self.is_used

    @property
    def is_used(self) -> bool:
        """Whether this process has chosen or used a device, as `torch.cuda.is_initialized`."""
        return self._used is not None

    def visible(self) -> tuple[int, ...]:
        """The GPUs of the node that this process sees, in its own order. See [Note: visible devices]."""
        if self._used is not None:
            return self._used
        text = env.snapshot().get(env.CUDA_VISIBLE_DEVICES.name)
        if text is None:
            return tuple(range(self.total))
        found: list[int] = []
        for word in map(str.strip, text.split(",")):
            if not word.isdecimal() or int(word) >= self.total:
                break  # CUDA reads no further.
            found.append(int(word))
        return tuple(found)

    @property
    def count(self) -> int:
        """How many of them this process sees."""
        return len(self.visible())

    def use(self) -> None:
        """Use CUDA: which devices are visible is settled.

        Raises:
            RuntimeError: this process was forked from one that had used CUDA.
        """
        if self.is_forked:
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
                "'spawn' start method"
            )
        if self._used is None:
            self._used = self.visible()
            # What torch asks in places: its checkpoints, whether there are random numbers of GPUs to restore.
            torch.cuda._initialized = True

    @property
    def current(self) -> int:
        """The device that `cuda` alone means in this thread."""
        index: int = getattr(self._local, "index", 0)
        return index

    def select(self, index: int) -> None:
        """Make `index` the current device of this thread."""
        self.check(index)
        self._local.index = index

    def check(self, index: int) -> int:
        """`index`, if there is such a device, which is in use from now on.

        Raises:
            RuntimeError: there is none, in CUDA's words; or as `use`.
        """
        self.use()
        if not 0 <= index < self.count:
            error: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)  # new in torch 2.8
            few = "" if self.count == self.total else f", and {env.CUDA_VISIBLE_DEVICES.name} leaves {self.count}"
            raise error(
                f"CUDA error: invalid device ordinal\n(Rehearsal: cuda:{index} is asked for, but this node has "
                f"{self.total} device(s), numbered from 0{few}.)"
            )
        return index

    def index_of(self, device: Any) -> int | None:
        """The stand-in that a word means, which is in use from now on: None for every device that is no GPU.

        Args:
            device: an int, a text, a `torch.device`, or None for the current device.

        Raises:
            RuntimeError: there is no such device.
        """
        if device is None:
            return self.check(self.current)
        if isinstance(device, int) and not isinstance(device, bool):
            return self.check(int(device) if device >= 0 else self.current)
        if not isinstance(device, torch.device):
            device = torch.device(device)
        if device.type != "cuda":
            return None
        return self.check(self.current if device.index is None else device.index)

    def cuda_index(self, device: Any) -> int:
        """The same for the functions of `torch.cuda`, which know no other devices.

        Raises:
            ValueError: not a GPU.
        """
        index = self.index_of(device)
        if index is None:
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return index


devices = Devices()
