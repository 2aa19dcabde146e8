"""Determines which rank is late when several wait for each other.

[Note: who is late] When a deadline passes, no failure has been noticed: a late rank makes the ranks that wait for it
late as well, and the deadlines of those that wait for these pass at the same moment. So a rank that has waited long for
one other rank tells all ranks which one, and tells them again when that wait is over. If a missing rank is itself
waiting, the rank that it waits for is blamed. In a sum of the first ranks it is unknown which of them is late; there a
rank announces that it waits for some of them, and those that do not announce that are blamed.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence

__all__ = ["FIRST_RANKS", "LateRanks"]

_WAITS = struct.Struct("!8siq")  # awaited rank, or _NOBODY, or FIRST_RANKS for some of these; number of the collective
_KIND = (29).to_bytes(8, "little")  # unlike the first bytes of a team's other messages
_NOBODY, FIRST_RANKS = -1, -2


class LateRanks:
    """The long waits announced by the ranks of a group.

    Args:
        rank: this rank.
        first_ranks: the first rank of each host.
        number_of: returns the collective that a rank is in, as far as it is known here.
        tell_all: sends a message to all other ranks.
    """

    def __init__(
        self, rank: int, first_ranks: Sequence[int], number_of: Callable[[int], int], tell_all: Callable[[bytes], None]
    ) -> None:
        self._rank, self._first_ranks, self._number_of, self._tell_all = rank, first_ranks, number_of, tell_all
        self._said = _NOBODY  # the rank that this one has announced to wait for
        self._awaited: dict[int, tuple[int, int]] = {}  # announcements of others: awaited rank, and collective

    def receive(self, peer: int, message: memoryview) -> bool:
        """Record a rank's announcement of its wait. Local; returns whether the message was one."""
        if message[:8] != _KIND:
            return False
        _, awaited, number = _WAITS.unpack(message)
        self._awaited[peer] = awaited, number
        return True

    def say_to_await(self, rank: int, number: int) -> None:
        """Tell all that this rank waits for `rank` in collective `number`; FIRST_RANKS for some of these. Local."""
        if rank != self._said:
            self._said = rank
            self._tell_all(_WAITS.pack(_KIND, rank, number))

    def say_to_go_on(self, number: int) -> None:
        """Tell all ranks that this one no longer waits, if it has announced a wait. Local."""
        self.say_to_await(_NOBODY, number)

    def awaited_by(self, ranks: Iterable[int]) -> list[int]:
        """Follow the waits of these ranks to their ends: the ranks that wait for nobody, which may be themselves.

        Excludes this rank. Local.
        """
        found, passed, left = [], {self._rank}, deque(ranks)
        while left:
            rank = left.popleft()
            if rank in passed:
                continue
            passed.add(rank)
            awaited, number = self._awaited.get(rank, (_NOBODY, 0))
            if awaited in (_NOBODY, self._rank) or number < self._number_of(rank):
                found.append(rank)
            else:
                left.extend(self._first_ranks if awaited == FIRST_RANKS else (awaited,))
        return found
