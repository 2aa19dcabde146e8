"""Detects reordered calls: two calls of the same shape that some ranks make in the opposite order.

`all_reduce(loss)` and then `all_reduce(count)`, and on another rank the other way round: every call agrees with its
counterpart in all that can be compared, and every result is the sum of two unrelated tensors. Only the lines reveal it:
rank 0 called from A and then from B, rank 1 from B and then from A.

[Note: lines may differ] Ranks may call one collective from different lines, each in its branch, so different lines
alone mean nothing. They may also be swapped legitimately, when a loop gives each rank a turn in a separate branch. So a
reordering is an error only if both lines had been common to all ranks until then. Otherwise it is a warning, given
once.

All ranks see the same lines of every collective in which lines differ, and reach the same verdict.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

__all__ = ["Order", "ReorderDetector"]

_MAX_LINES = 4096


class Order(enum.Enum):
    """Verdict on a collective that the ranks called from different lines."""

    ORDINARY = enum.auto()
    SUSPICIOUS = enum.auto()  # swapped, possibly on purpose
    REORDERED = enum.auto()


class ReorderDetector:
    """Remembers the lines from which the ranks of one group called collectives."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # line -> number of the first collective called from it on this rank
        self._disagreed: set[int] = set()  # lines that not all ranks had in common
        self._last_number = 0
        self._last_fingerprint = 0
        self._last_lines: tuple[int, ...] = ()
        self._common_before: set[int] = set()  # of the last such lines, those that had been common until then

    def note_line(self, line: int, number: int) -> None:
        """Note that this rank calls a collective from a line for the first time."""
        if len(self._first) < _MAX_LINES:
            self._first.setdefault(line, number)

    def judge(self, number: int, fingerprint: int, lines: Sequence[int]) -> Order:
        """Judge a collective in which all ranks have the same fingerprint, but different lines.

        Args:
            number: the number of the collective.
            fingerprint: the fingerprint of its description.
            lines: the line of each rank.
        """
        order = Order.ORDINARY
        if (number, fingerprint) == (self._last_number + 1, self._last_fingerprint):
            swapped = self._swapped(lines)
            if swapped:
                order = Order.REORDERED if self._were_common(swapped) else Order.SUSPICIOUS
        self._last_number, self._last_fingerprint, self._last_lines = number, fingerprint, tuple(lines)
        self._common_before = set(lines) - self._disagreed
        if len(self._disagreed) < _MAX_LINES:
            self._disagreed.update(lines)
        return order

    def _swapped(self, lines: Sequence[int]) -> set[int]:
        """The lines that two ranks passed in opposite order, in the previous collective and this one."""
        ways = set(zip(self._last_lines, lines, strict=True))
        return {line for way in ways if way[0] != way[1] and way[::-1] in ways for line in way}

    def _were_common(self, lines: set[int]) -> bool:
        """Whether all ranks had called from each of these lines, always together, before the previous collective."""
        return all(
            line in self._common_before and self._first.get(line, self._last_number) < self._last_number
            for line in lines
        )
