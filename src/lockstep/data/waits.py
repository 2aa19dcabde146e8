"""How long a training loop waits for its batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from lockstep.data.loader import DataLoader

__all__ = ["Waits"]


class Waits:
    """The batches of an epoch, and how long the loop waits for them.

    Args:
        loader: begins its next epoch now.

    Attributes:
        batches: its iterator.
        first_s: seconds until the first batch.
        total_s: seconds for all batches so far, and for learning that there is none left.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._since = time.perf_counter()
        self.batches = iter(loader)
        self.first_s = 0.0
        self.total_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        for data in self.batches:
            self._enter()
            yield data
            self._since = time.perf_counter()
        self._enter()

    def _enter(self) -> None:
        waited_s = time.perf_counter() - self._since
        self.total_s += waited_s
        self.first_s = self.first_s or waited_s
