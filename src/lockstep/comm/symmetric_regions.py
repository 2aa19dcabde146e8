"""The symmetric memory of one group on one rank: which tensors lie in it, and where."""

from __future__ import annotations

from bisect import bisect_right

import torch

from lockstep.shm.team import Region

__all__ = ["SymmetricRegions"]


class SymmetricRegions:
    """Regions by address, to recognise tensors that lie in one.

    Attributes:
        starts: the address of this rank's part of each region, in order. Empty if there are no regions: a caller on a
            hot path checks this first.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []
        self._ends: list[int] = []
        self._regions: list[Region] = []

    def add(self, region: Region) -> None:
        """Add a region. Local."""
        start = region.own.data_ptr()
        index = bisect_right(self.starts, start)
        self.starts.insert(index, start)
        self._ends.insert(index, start + region.part_bytes)
        self._regions.insert(index, region)

    def find(self, tensor: torch.Tensor) -> tuple[Region, int] | None:
        """The region in which a contiguous tensor lies, and its offset there in bytes; None for others. Local."""
        if not self.starts or not tensor.is_contiguous():
            return None
        address = tensor.data_ptr()
        index = bisect_right(self.starts, address) - 1
        if index < 0 or address + tensor.numel() * tensor.element_size() > self._ends[index]:
            return None
        return self._regions[index], address - self.starts[index]

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """The offset in bytes of a tensor in its region; None if it lies in none. Local."""
        found = self.find(tensor)
        return None if found is None else found[1]

    def clear(self) -> None:
        """Forget all regions. Local."""
        self.starts.clear()
        self._ends.clear()
        self._regions.clear()
