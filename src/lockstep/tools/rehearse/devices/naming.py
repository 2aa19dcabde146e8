"""Which device a word means: `cuda`, `cuda:1`, 1, `torch.device("cuda")`, and what a script may say instead."""

from __future__ import annotations

import threading
from typing import Any

import torch

__all__ = ["CPU", "Devices", "devices"]

CPU = torch.device("cpu")


class Devices:
    """The stand-ins of this process.

    Attributes:
        count: how many there are.
    """

    def __init__(self) -> None:
        self.count = 0
        self._local = threading.local()

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
        """`index`, if there is such a device.

        Raises:
            RuntimeError: there is none, in CUDA's words.
        """
        if not 0 <= index < self.count:
            error: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)  # new in torch 2.8
            raise error(
                f"CUDA error: invalid device ordinal\n(Rehearsal: cuda:{index} is asked for, but this node has "
                f"{self.count} device(s), numbered from 0.)"
            )
        return index

    def index_of(self, device: Any) -> int | None:
        """The stand-in that a word means: None for the CPU and every other device that is no GPU.

        Args:
            device: an int, a text, a `torch.device`, or None for the current device.

        Raises:
            RuntimeError: there is no such device.
        """
        if device is None:
            return self.current
        if isinstance(device, int) and not isinstance(device, bool):
            return self.check(int(device)) if device >= 0 else self.current
        if not isinstance(device, torch.device):
            device = torch.device(device)
        if device.type != "cuda":
            return None
        return self.current if device.index is None else self.check(device.index)

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
