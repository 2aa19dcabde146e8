"""Which stand-in a script's `cuda`, `cuda:1`, 1 or `torch.device("cuda")` refers to.

[Note: visible devices] CUDA reads CUDA_VISIBLE_DEVICES when a process first uses it; `cuda:0` is then the first GPU
listed. Processes that each see one GPU by that variable, and call it `cuda:0`, therefore do not share it.
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
        total: number of GPUs of the simulated node.
        is_forked: whether this process was forked from one that had used CUDA, and so cannot use it.
    """

    def __init__(self) -> None:
        self.total = 0
        self.is_forked = False
        self._used: tuple[int, ...] | None = None
        self._local = threading.local()

    def install(self, total: int) -> None:
        """Simulate `total` GPUs. Call it once."""
        self.total = total
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self.is_forked = self.is_used

    @property
    def is_used(self) -> bool:
        """Whether this process has chosen or used a device, which initializes CUDA."""
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
                break  # CUDA ignores the rest of the list.
            found.append(int(word))
        return tuple(found)

    @property
    def count(self) -> int:
        """Number of GPUs that this process sees."""
        return len(self.visible())

    def use(self) -> None:
        """Initialize CUDA, which fixes the visible devices.

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
            # torch reads this directly: activation checkpointing, to decide whether to restore GPU random states.
            torch.cuda._initialized = True

    @property
    def current(self) -> int:
        """Index of this thread's current device, to which `cuda` without a number refers."""
        index: int = getattr(self._local, "index", 0)
        return index

    def select(self, index: int) -> None:
        """Make `index` the current device of this thread."""
        self.check(index)
        self._local.index = index

    def check(self, index: int) -> int:
        """Initialize CUDA, and return `index` if there is such a device.

        Raises:
            RuntimeError: there is no such device (with CUDA's message), or as for `use`.
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
        """Index of the stand-in that `device` refers to, initializing CUDA; None if it is not a GPU.

        Args:
            device: an int, a string, a `torch.device`, or None for the current device.

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
        """`index_of` for functions of `torch.cuda`, which accept only GPUs.

        Raises:
            ValueError: `device` is not a GPU.
        """
        index = self.index_of(device)
        if index is None:
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return index


devices = Devices()
