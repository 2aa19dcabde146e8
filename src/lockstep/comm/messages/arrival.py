"""Distributes the control messages of a collective: few ranks send to all others, more ranks along a tree.

[Note: tree] With few ranks each sends its control message to all others. With more, each would spend its time sending:
15 messages for one all_reduce of a number at 16 ranks, 240 in all. So control messages go up a tree and down again: a
rank sends its parent everything received from below, and the root, which then has everything, sends it to its children.
That takes 2 (W - 1) messages, as many as a ring, whose messages are sequential. The ranks of a host are below its first
rank, and the first ranks of the hosts below that of the first one: few messages cross between hosts.

[Note: late ranks] A rank that has not arrived holds back the messages that it would forward. So a rank that has waited
for a while sends its own to all as well: before any deadline every rank knows which ranks are missing, and where the
others are. A message that comes twice, or late, changes nothing: a record is only replaced by one of a later
collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lockstep.comm.messages.notices import forward_notices, join_notices

__all__ = [
    "LARGEST_ATTACHMENT_BYTES",
    "Arrival",
    "Entries",
    "Forwarding",
    "attachment_bytes",
    "forwardings_of",
]

# Up to this number of ranks, each sends to all.
_FEW_RANKS = 3
# Number of children of a rank on its own host, and also on other hosts.
_FAN_OUT = 8
# Limits of the attachments of one rank: to all messages of one collective together, and to a single one.
_ATTACHED_BYTES, LARGEST_ATTACHMENT_BYTES = 16 << 10, 4 << 10
# Longer than a collective takes, even with many ranks on few cores; shorter than any deadline.
_PATIENCE_S = 0.05


def attachment_bytes(world_size: int) -> int:
    """Maximum size of a rank's attachment to its control message. See [Note: attachments] in `message_team.py`.

    >>> attachment_bytes(2), attachment_bytes(9), attachment_bytes(65)
    (4096, 2048, 256)
    """
    return min(_ATTACHED_BYTES // max(world_size - 1, 1), LARGEST_ATTACHMENT_BYTES)


def _parents(hosts: Sequence[Sequence[int]]) -> dict[int, int]:
    """Parent of each rank except the root."""
    trees = [[ranks[0] for ranks in hosts], *hosts]
    return {rank: ranks[index // _FAN_OUT] for ranks in trees for index, rank in enumerate(ranks[1:])}


@dataclass(frozen=True)
class Forwarding:
    """One step of forwarding.

    Attributes:
        awaited: the ranks whose messages must have come before.
        peers: the ranks that receive the messages.
        given: the ranks whose messages are sent.
    """

    awaited: tuple[int, ...]
    peers: tuple[int, ...]
    given: tuple[int, ...]


def forwardings_of(rank: int, hosts: Sequence[Sequence[int]]) -> tuple[Forwarding, ...]:
    """The forwarding steps of a rank, in order; empty if each rank sends to all. See [Note: tree].

    Args:
        rank: the rank.
        hosts: the ranks of each host.

    >>> for one in forwardings_of(2, [[0, 1], [2, 3]]):
    ...     print(one.awaited, one.peers, one.given)
    (3,) (0,) (2, 3)
    (0, 1, 3) (3,) (0, 1, 2, 3)
    """
    parents = _parents(hosts)
    if len(parents) < _FEW_RANKS:
        return ()
    everybody = sorted([hosts[0][0], *parents])
    children_of: dict[int, list[int]] = {}
    for peer, parent in parents.items():
        children_of.setdefault(parent, []).append(peer)
    children = children_of.get(rank, [])
    below = list(children)
    for peer in below:  # grows in the loop
        below += children_of.get(peer, ())
    forwardings = []
    if rank in parents:
        forwardings.append(Forwarding(tuple(sorted(below)), (parents[rank],), tuple(sorted([rank, *below]))))
    if children:
        others = tuple(peer for peer in everybody if peer != rank)
        forwardings.append(Forwarding(others, tuple(children), tuple(everybody)))
    return tuple(forwardings)


class Entries:
    """The control messages of all ranks for the latest even and the latest odd collective.

    [Note: one ahead] A peer may be one collective ahead, and its message for that may arrive before the one for this
    collective, which other ranks forward. So even and odd collectives are kept apart, as in records.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._numbers = [[0] * world_size for _ in range(2)]
        self._notices: list[list[bytes | memoryview]] = [[b""] * world_size for _ in range(2)]
        self._attachments: list[list[bytes | memoryview]] = [[b""] * world_size for _ in range(2)]
        self._joined: list[tuple[int, bytes | memoryview]] = [(0, b"")] * 2

    def add(self, rank: int, number: int, notice: bytes | memoryview, attachment: bytes | memoryview) -> None:
        """Store the message of a rank that has arrived at collective `number`, including its attachment."""
        parity = number & 1
        self._notices[parity][rank], self._attachments[parity][rank] = notice, attachment
        self._numbers[parity][rank] = number

    def add_joined(self, number: int, message: bytes | memoryview, attachments: Sequence[bytes | memoryview]) -> None:
        """Store all ranks' attachments for collective `number`, received in one joined message."""
        parity = number & 1
        self._joined[parity] = number, message
        numbers, kept = self._numbers[parity], self._attachments[parity]
        for rank, attachment in enumerate(attachments):
            if numbers[rank] < number:
                numbers[rank], kept[rank] = number, attachment

    def missing(self, ranks: Iterable[int], number: int) -> list[int]:
        """Those of these ranks that have not arrived at collective `number` yet."""
        numbers = self._numbers[number & 1]
        return [rank for rank in ranks if numbers[rank] != number]

    def notice(self, rank: int, number: int) -> bytes | memoryview:
        """The message of a rank that has arrived at collective `number`; not if it came only in `joined`."""
        return self._notices[number & 1][rank]

    def joined(self, number: int) -> bytes | memoryview | None:
        """The joined message of all ranks for collective `number`, or None."""
        found, message = self._joined[number & 1]
        return message if found == number else None

    def attachment(self, rank: int, number: int) -> bytes | memoryview:
        """The attachment of that rank's message for collective `number`."""
        return self._attachments[number & 1][rank]


class Arrival:
    """This rank's part in distributing the messages of one collective: sends its own, forwards others. Local.

    Args:
        rank: this rank, whose own message is among `entries`.
        number: the number of the collective.
        entries: the messages received so far.
        others: all other ranks.
        forwardings: the forwarding steps of this rank; empty if each rank sends to all.
        send: sends a message to a rank.
        longest_bytes: maximum length of a message for `send`.
    """

    def __init__(
        self,
        rank: int,
        number: int,
        entries: Entries,
        others: Sequence[int],
        forwardings: Sequence[Forwarding],
        send: Callable[[int, bytes | memoryview], None],
        longest_bytes: int,
    ) -> None:
        self._rank, self._number, self._entries, self._others = rank, number, entries, others
        self._forwardings, self._num_forwarded = forwardings, 0
        self._send, self._longest_bytes = send, longest_bytes
        self._patient_until_s = time.monotonic() + _PATIENCE_S
        self._has_sent_to_all = not forwardings
        if forwardings:
            self._forward()
        else:
            self._send_to_all()

    def go_on(self) -> list[int]:
        """Send what can be sent now. Call it after each received message, and periodically.

        Returns:
            The ranks that have not arrived.
        """
        if self._num_forwarded < len(self._forwardings):
            self._forward()
        missing = self._entries.missing(self._others, self._number)
        if missing and not self._has_sent_to_all and time.monotonic() > self._patient_until_s:
            self._has_sent_to_all = True
            self._send_to_all()
        return missing

    def _forward(self) -> None:
        for one in self._forwardings[self._num_forwarded :]:
            if self._entries.missing(one.awaited, self._number):
                return
            self._num_forwarded += 1
            for message in self._messages_of(one.given):
                for peer in one.peers:
                    self._send(peer, message)

    def _messages_of(self, ranks: Sequence[int]) -> Iterable[bytes | memoryview]:
        entries, number = self._entries, self._number
        if len(ranks) == 1:
            return [entries.notice(ranks[0], number)]
        if len(ranks) > len(self._others):
            joined = entries.joined(number)
            if joined is None:
                joined = join_notices(number, [entries.notice(rank, number) for rank in ranks], self._longest_bytes)
            if joined is not None:
                return [joined]
        return forward_notices([(rank, entries.notice(rank, number)) for rank in ranks], self._longest_bytes)

    def _send_to_all(self) -> None:
        notice = bytes(self._entries.notice(self._rank, self._number))
        for peer in self._others:
            self._send(peer, notice)
