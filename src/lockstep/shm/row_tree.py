"""The pairwise tree over the rows of a matrix, for sums that are computed repeatedly in the same memory.

With small tensors the cost of a reduction is that of its calls of torch, mostly for creating views of parts. It is
higher if many ranks share a core, because each finds the caches full of the others' data. Measured with 4, 8, 16 and 32
ranks on two cores, a reduction of 4 bytes: 19, 38, 100 and 150 µs with new views each time, 12, 19, 35 and 65 µs with
these.
"""

from __future__ import annotations

import torch

from lockstep.shm.kernels import Kernel, divide

__all__ = ["ALIGNMENT", "RowShare", "RowTree", "even_bounds"]

ALIGNMENT = 16  # elements; shares start at whole cache lines for 4-byte elements


def even_bounds(numel: int, count: int) -> list[int]:
    """Bounds of equal shares, a multiple of `ALIGNMENT`, except that the last has the rest; count + 1 numbers.

    >>> even_bounds(1000, 3)
    [0, 320, 640, 1000]
    """
    share = numel // count // ALIGNMENT * ALIGNMENT
    return [share * number for number in range(count)] + [numel]


_Level = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class RowTree:
    """Combines the rows of one matrix, in the order of [Note: tree order] in `kernels.py`.

    A row and its partner are combined into the row's place in `sums`; a row without a partner stays where it is.

    Args:
        rows: of shape (parts, numel), with at least three rows, each contiguous. Only read; may change between calls.
        sums: memory for intermediate sums, of the same shape, in the dtype in which kernels accumulate.
    """

    def __init__(self, rows: torch.Tensor, sums: torch.Tensor) -> None:
        count = len(rows)
        self._count = count
        self._copied: tuple[torch.Tensor, torch.Tensor] | None = None
        self._levels: list[_Level] = []
        if rows.dtype != sums.dtype:
            self._copied = (sums, rows)
            rows = sums
        elif count & 1:
            self._copied = (sums[count - 1], rows[count - 1])
        self._is_converted = rows is sums
        step = 1
        while 2 * step < count:
            partners = rows[step :: 2 * step]
            pairs = slice(0, 2 * step * len(partners), 2 * step)
            self._levels.append((rows[pairs], partners, sums[pairs]))
            rows = sums
            step *= 2
        self._last = (sums[0], sums[step])

    def reduce(self, kernel: Kernel, out: torch.Tensor) -> None:
        """Combine the rows into `out`. Local.

        Args:
            kernel: combines two rows; accumulates in the dtype of `sums`.
            out: of shape (numel,), in the dtype of the rows; may be one of them.
        """
        combine = kernel.combine
        if self._copied is not None:
            target, source = self._copied
            target.copy_(source)
        for left, right, target in self._levels:
            combine(left, right, out=target)
        left, right = self._last
        total = left if self._is_converted else out
        combine(left, right, out=total)
        if kernel.divide:
            divide(total, self._count)
        if total is not out:
            out.copy_(total)


class RowShare:
    """One rank's share of the columns of a matrix with one row per rank: it combines them for all ranks.

    Every call of torch handles all rows, because with many ranks and short shares calls take most of the time. Measured
    with 8 rows, in one process: the share of 64 KiB in 20 µs, and in 160 µs with calls for each row; of 1 MiB in 80 µs,
    and in 180.

    Args:
        rows: of shape (parts, numel), with at least three rows, each contiguous, at a constant stride.
        rank: index of this rank's row and share.
        sums: flat memory for intermediate sums, in the dtype in which kernels accumulate. Its size determines how many
            columns are combined at a time.
        is_handed_back: whether to write the results to all rows, or only to this rank's row. See [Note: who writes a
            line] in `algorithms.py`.

    Attributes:
        own: the row of this rank.
    """

    def __init__(self, rows: torch.Tensor, rank: int, sums: torch.Tensor, is_handed_back: bool) -> None:
        count, numel = rows.shape
        self.own = rows[rank]
        bounds = even_bounds(numel, count)
        share = bounds[1] - bounds[0]
        self._shared = share * count  # the rest belongs to the last share
        self._is_handed_back = is_handed_back
        # Row r of this matrix is the share of rank r in row r.
        self._results = rows.as_strided((count, share), (rows.stride(0) + share, 1))
        self._rest = rows[-1, self._shared :]
        self._pieces: list[tuple[RowTree, torch.Tensor, torch.Tensor]] = []
        width = sums.numel() // count
        for start in range(bounds[rank], bounds[rank + 1], width):
            columns = rows[:, start : min(start + width, bounds[rank + 1])]
            tree = RowTree(columns, sums[: columns.numel()].view(columns.shape))
            self._pieces.append((tree, columns, columns[rank]))

    def reduce(self, kernel: Kernel) -> None:
        """Combine the columns of the share from all rows. Local."""
        for tree, columns, result in self._pieces:
            tree.reduce(kernel, result)
            if self._is_handed_back:
                columns.copy_(result)

    def copy_to(self, out: torch.Tensor) -> None:
        """Copy the results of all shares to `out`, of shape (numel,), once all ranks have combined theirs. Local."""
        if self._is_handed_back:
            out.copy_(self.own)
            return
        out[: self._shared].view(self._results.shape).copy_(self._results)
        if self._rest.numel():
            out[self._shared :].copy_(self._rest)
