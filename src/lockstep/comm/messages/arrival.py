"""Distributes the notices of a collective: up to eight ranks send to all others, more ranks forward notices.

[Note: dissemination] With few ranks each sends its notice to all others. With more, each would spend its time on
sending: 15 messages for one all_reduce of a number at 16 ranks. So they follow the dissemination algorithm: in round k
a rank sends all notices that it holds to rank + 2^k. Their number doubles each round, so a rank sends ceil(log2 W)
messages: 4 at 16 ranks. Measured with one or two ranks on each of 8 hosts, all on two cores: with 8 ranks a barrier
takes as long, with 16 three quarters of the time. Rounds come after each other, so few ranks do better without.

[Note: late ranks] A rank that has not come holds back the notices that it would forward. So a rank that has waited for
a while sends its notice to all, too: before any deadline every rank knows who is missing, and where the others are. A
notice that comes twice, or late, changes nothing: only a record of a later collective replaces a record.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lockstep.comm.messages.notices import forward_notices

__all__ = [
    "LARGEST_ATTACHMENT_BYTES",
    "Arrival",
    "Entries",
    "ForwardingRound",
    "attachment_bytes",
    "num_hops",
    "rounds_of",
]

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
class ForwardingRound:
    """One round of the dissemination algorithm.

    Attributes:
        peer: the rank that gets the notices.
        given: the ranks whose notices it gets.
        awaited: the ranks whose notices must have come before the next round.
    """

    peer: int
    given: tuple[int, ...]
    awaited: tuple[int, ...]


def rounds_of(rank: int, world_size: int) -> tuple[ForwardingRound, ...]:
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
        rounds.append(ForwardingRound((rank + step) % world_size, given, awaited))
        step *= 2
    return tuple(rounds)


class Entries:
    """The notices with which all ranks came to a collective: to the last even one, and to the last odd one.

    [Note: one ahead] A peer may be one collective ahead, and its notice for that may be here before the one for this
    collective, which comes by way of others. So even and odd collectives are kept apart, as in records.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._numbers = [[0] * world_size for _ in range(2)]
        self._notices: list[list[bytes | memoryview]] = [[b""] * world_size for _ in range(2)]
        self._attachments: list[list[bytes | memoryview]] = [[b""] * world_size for _ in range(2)]

    def add(self, rank: int, number: int, notice: bytes | memoryview, attachment: bytes | memoryview) -> None:
        """Keep the notice of a rank that has come to collective `number`, attachment included."""
        parity = number & 1
        self._notices[parity][rank], self._attachments[parity][rank] = notice, attachment
        self._numbers[parity][rank] = number

    def missing(self, ranks: Iterable[int], number: int) -> list[int]:
        """Those of these ranks that have not come to collective `number` yet."""
        numbers = self._numbers[number & 1]
        return [rank for rank in ranks if numbers[rank] != number]

    def notice(self, rank: int, number: int) -> bytes | memoryview:
        """The notice of a rank that has come to collective `number`."""
        return self._notices[number & 1][rank]

    def attachment(self, rank: int, number: int) -> bytes | memoryview:
        """What that rank attached to it."""
        return self._attachments[number & 1][rank]


class Arrival:
    """This rank's part in one collective's dissemination: sends its own notice, and forwards those of others. Local.

    Args:
        rank: this rank, whose own notice is among `entries`.
        number: the number of the collective.
        entries: the notices that have come.
        others: all other ranks.
        rounds: the rounds of this rank; none where each rank sends to all.
        send: sends a message to a rank.
        longest_bytes: the longest message that `send` takes.
    """

    def __init__(
        self,
        rank: int,
        number: int,
        entries: Entries,
        others: Sequence[int],
        rounds: Sequence[ForwardingRound],
        send: Callable[[int, bytes], None],
        longest_bytes: int,
    ) -> None:
        self._rank, self._number, self._entries, self._others = rank, number, entries, others
        self._rounds = deque(rounds)
        self._send, self._longest_bytes = send, longest_bytes
        self._patient_until_s = time.monotonic() + _PATIENCE_S
        self._has_sent_to_all = not rounds
        if rounds:
            self._forward(rounds[0])
        else:
            self._send_to_all()

    def go_on(self) -> list[int]:
        """Send what can be sent now. Call it after each message, and now and then.

        Returns:
            The ranks that have not come.
        """
        rounds = self._rounds
        while rounds and not self._entries.missing(rounds[0].awaited, self._number):
            rounds.popleft()
            if rounds:
                self._forward(rounds[0])
        if rounds and not self._has_sent_to_all and time.monotonic() > self._patient_until_s:
            self._has_sent_to_all = True
            self._send_to_all()
        return self._entries.missing(self._others, self._number)

    def _forward(self, one: ForwardingRound) -> None:
        notices = [(rank, self._entries.notice(rank, self._number)) for rank in one.given]
        for message in forward_notices(notices, self._longest_bytes):
            self._send(one.peer, message)

    def _send_to_all(self) -> None:
        notice = bytes(self._entries.notice(self._rank, self._number))
        for peer in self._others:
            self._send(peer, notice)
