"""How long a training loop waits for its batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from lockstep.data.loader import DataLoader

__all__ = ["Waits"]


class Waits(Iterator[Any]):
    """The batches of an epoch, and how long the loop waits for them.

    Args:
        loader: begins its next epoch now.

    Attributes:
        batches: its iterator.
        first_s: seconds until the first batch.
        total_s: seconds for all batches so far, and for learning that there is none left.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        since = time.perf_counter()
        self.batches = iter(loader)
        self.total_s = time.perf_counter() - since
        self.first_s = 0.0

    def __next__(self) -> Any:
        since = time.perf_counter()
        try:
            return next(self.batches)
        finally:
            self.total_s += time.perf_counter() - since
            self.first_s = self.first_s or self.total_s
