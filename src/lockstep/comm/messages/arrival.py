"""How the notices of a collective reach all ranks: from each to each, or handed on.

[Note: notices handed on] With few ranks each sends its notice to all others. With more, each would spend its time on
sending: 15 messages for one all_reduce of a number at 16 ranks. So a rank hands on what it has received, in rounds: in
round k to the rank 2^k behind it, all that it has, which doubles. After log2 of them everybody has everything, by four
messages at 16 ranks. Measured with one or two ranks on each of 8 hosts, all on two cores: with 8 ranks a barrier takes
as long, with 16 three quarters of the time. Hops come after each other, so few ranks do better without.

[Note: impatience] A rank that has come is not seen by those behind one that has not. So whoever has waited for a while
sends its notice to all, too: before any deadline every rank knows who is missing, and where the others are. What comes
twice, or late, changes nothing: a record is only replaced by one of a later collective.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["LARGEST_ATTACHMENT_BYTES", "Arrival", "Round", "attachment_bytes", "num_hops", "rounds_of"]

# With so many ranks and fewer, each sends to all.
_FEW_RANKS = 8
# What a rank may attach to all its notices of one collective together, and to one of them.
_ATTACHED_BYTES, LARGEST_ATTACHMENT_BYTES = 16 << 10, 4 << 10
# Longer than a collective takes, also of many ranks on few cores; shorter than any deadline.
_PATIENCE_S = 0.05


def attachment_bytes(world_size: int) -> int:
    """How much a rank may attach to its notice. See [Note: attachments] in `message_team.py`.

    >>> attachment_bytes(2), attachment_bytes(9), attachment_bytes(65)
    (4096, 2048, 256)
    """
    return min(_ATTACHED_BYTES // max(world_size - 1, 1), LARGEST_ATTACHMENT_BYTES)


def num_hops(world_size: int) -> int:
    """Messages that follow each other until all ranks have all notices.

    >>> num_hops(8), num_hops(9), num_hops(64)
    (1, 4, 6)
    """
    return 1 if world_size <= _FEW_RANKS else (world_size - 1).bit_length()


@dataclass(frozen=True)
class Round:
    """One round of handing on.

    Attributes:
        peer: the rank that gets the notices.
        given: the ranks whose notices it gets.
        awaited: the ranks whose notices must have come before the next round.
    """

    peer: int
    given: tuple[int, ...]
    awaited: tuple[int, ...]


def rounds_of(rank: int, world_size: int) -> tuple[Round, ...]:
    """The rounds of a rank; none where each rank sends to all.

    >>> for one in rounds_of(0, 9):
    ...     print(one.peer, one.given, one.awaited)
    1 (0,) (8,)
    2 (0, 8) (7, 6)
    4 (0, 8, 7, 6) (5, 4, 3, 2)
    8 (0,) (1,)
    """
    rounds = []
    step = 1
    while world_size > _FEW_RANKS and step < world_size:
        behind = range(min(step, world_size - step))
        given = tuple((rank - distance) % world_size for distance in behind)
        awaited = tuple((rank - step - distance) % world_size for distance in behind)
        rounds.append(Round((rank + step) % world_size, given, awaited))
        step *= 2
    return tuple(rounds)


class Arrival:
    """This rank's part in making one collective known. Local.

    Args:
        rounds: of this rank.
        has_come: whether the notice of a rank is here.
        hand_on: sends the notices of ranks to one.
        tell_all: sends the notice of this rank to all others.
    """

    def __init__(
        self,
        rounds: Sequence[Round],
        has_come: Callable[[int], bool],
        hand_on: Callable[[int, Sequence[int]], None],
        tell_all: Callable[[], None],
    ) -> None:
        self._rounds = deque(rounds)
        self._has_come = has_come
        self._hand_on = hand_on
        self._tell_all = tell_all
        self._patient_until_s = time.monotonic() + _PATIENCE_S
        self._has_told = not rounds
        if rounds:
            hand_on(rounds[0].peer, rounds[0].given)
        else:
            tell_all()

    def go_on(self) -> None:
        """Send what can be sent now. Call it after each message, and now and then."""
        rounds = self._rounds
        while rounds and all(map(self._has_come, rounds[0].awaited)):
            rounds.popleft()
            if rounds:
                self._hand_on(rounds[0].peer, rounds[0].given)
        if rounds and not self._has_told and time.monotonic() > self._patient_until_s:
            self._has_told = True
            self._tell_all()
