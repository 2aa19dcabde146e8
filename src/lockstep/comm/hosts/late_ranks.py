"""Which rank is late where several wait for each other.

[Note: who is late] At a deadline nobody has noticed a failure: a rank that is late makes those late that wait for it,
and the deadlines of those who wait for these come at the same moment. So a rank that has waited long for one other
tells all for which, and tells them when that is over. Who misses a rank that waits for another one blames that one.
In a sum of the first ranks nobody knows which of them is late; there a rank says that it waits for some of them, and
those are blamed that do not say so.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence

__all__ = ["FIRST_RANKS", "LateRanks"]

_WAITS = struct.Struct("!8siq")  # for which rank, or _NOBODY, or FIRST_RANKS for some of these; in which collective
_KIND = (29).to_bytes(8, "little")  # unlike the beginnings of a team's other messages
_NOBODY, FIRST_RANKS = -1, -2


class LateRanks:
    """What the ranks of a group say of their long waits.

    Args:
        rank: this rank.
        first_ranks: the first rank of each host.
        number_of: tells in which collective a rank is, as far as it is known here.
        tell_all: sends a message to all other ranks.
    """

    def __init__(
        self, rank: int, first_ranks: Sequence[int], number_of: Callable[[int], int], tell_all: Callable[[bytes], None]
    ) -> None:
        self._rank, self._first_ranks, self._number_of, self._tell_all = rank, first_ranks, number_of, tell_all
        self._said = _NOBODY  # for whom this rank waits
        self._awaited: dict[int, tuple[int, int]] = {}  # what others have said: for whom, and in which collective

    def receive(self, peer: int, message: memoryview) -> bool:
        """Note what a rank says of its wait. Local; whether that is what the message is."""
        if message[:8] != _KIND:
            return False
        _, awaited, number = _WAITS.unpack(message)
        self._awaited[peer] = awaited, number
        return True

    def say_to_await(self, rank: int, number: int) -> None:
        """Tell all for which rank this one waits in collective `number`, or FIRST_RANKS for some of these. Local."""
        if rank != self._said:
            self._said = rank
            self._tell_all(_WAITS.pack(_KIND, rank, number))

    def say_to_go_on(self, number: int) -> None:
        """Tell all that this rank waits for nobody any more, if it has said that it waits. Local."""
        self.say_to_await(_NOBODY, number)

    def awaited_by(self, ranks: Iterable[int]) -> list[int]:
        """For whom these ranks wait, or those for whom they wait, and so on; of those that say nothing, themselves.

        Without this rank. Local.
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
