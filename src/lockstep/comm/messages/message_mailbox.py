"""Send and receive for groups whose ranks exchange messages: over MPI, or between hosts.

Messages are matched by source and tag, in the order of sending. `lockstep.comm.p2p` drives it, as it drives
`lockstep.shm.mailbox`.

[Note: eager, announced, granted] A small message travels through the team's channel, with its label; its send completes
at once, and a receiver that does not need it yet keeps it. A large one is announced there. When a receive matches and
the labels agree, the receiver *grants* it: its team has started receiving into the user's memory, and the sender sends
straight into it. The send completes when the receiver has confirmed that everything has arrived, so a rank that waits
for its sends may leave. Granted messages from one rank come in the order of its grants, so MPI and Gloo need only one
tag for all of them, and torch's tags are not limited by theirs.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic

import torch

from lockstep.comm.messages.message_team import MESSAGE_BYTES, MessageTeam, RequestT
from lockstep.comm.messages.notices import NOT_OURS
from lockstep.shm.base_mailbox import BaseMailbox
from lockstep.shm.messages import Incoming, Label, Matcher, Receive, Send

__all__ = ["MessageMailbox"]

_HEADER = struct.Struct("=5q")  # kind, number, tag, bytes of the whole message, bytes of the label
_LABEL_BYTES = 1024
_EAGER_BYTES = 4 << 10
assert _HEADER.size + _LABEL_BYTES + _EAGER_BYTES <= MESSAGE_BYTES

_LABEL_CACHE_ENTRIES = 1024


class _Kind(IntEnum):
    """Kinds of messages; the numbers differ from those of control messages."""

    EAGER = 11  # a complete message
    ANNOUNCE = 12  # a large message waits to be granted
    GRANT = 13  # to the sender: send it now
    REFUSE = 14  # to the sender: the matching receive has this label, which does not agree
    CONFIRM = 15  # to the sender: all of it has arrived


_decode_label = functools.lru_cache(_LABEL_CACHE_ENTRIES)(Label.decode)


@dataclass(eq=False)
class _Movement(Generic[RequestT]):
    """A granted message in transit.

    Attributes:
        operation: this rank's send or receive.
        number: number of the message.
        requests: the team's handles of the pending sends or receives.
        confirmed: whether the receiver has confirmed that everything has arrived.
    """

    operation: Send | Receive
    number: int
    requests: list[RequestT]
    confirmed: bool = False


@dataclass(eq=False)
class _Peer(Generic[RequestT]):
    """The pending messages with another rank, by number of the message."""

    num_messages: int = 0
    announced: dict[int, Send] = field(default_factory=dict)
    granted: dict[int, _Movement[RequestT]] = field(default_factory=dict)


class MessageMailbox(BaseMailbox, Generic[RequestT]):
    """The messages of one rank. Not thread-safe, except that another thread may use its team.

    Args:
        team: the ranks of the group.
        matcher: matches messages and receives; passed if this is not the only mailbox of its rank.

    Attributes:
        num_records: number of messages received, sent and moved so far; changes whenever there is progress.
    """

    num_records = 0

    def __init__(self, team: MessageTeam[RequestT], matcher: Matcher | None = None) -> None:
        super().__init__(matcher)
        self._team = team
        self._peers: list[_Peer[RequestT]] = [_Peer() for _ in range(team.world_size)]
        self._moving: list[_Movement[RequestT]] = []

    # ---- asked for from above ------------------------------------------------------------------------

    def send(self, peer: int, tag: int, label: Label, flat: torch.Tensor) -> Send:
        send = Send(tag, label, flat, peer=peer)
        if peer == self._team.rank:
            self._match(Incoming(peer, tag, label, flat.numel(), own=send))
            return send
        to = self._peers[peer]
        to.num_messages += 1
        send.number = to.num_messages
        if flat.numel() <= _EAGER_BYTES:
            self._send_record(peer, _Kind.EAGER, send.number, tag, label, flat.numel(), flat.numpy().tobytes())
            self._finish(send)
        else:
            to.announced[send.number] = send
            self._send_record(peer, _Kind.ANNOUNCE, send.number, tag, label, flat.numel())
        return send

    def progress(self) -> None:
        self._team.poll()
        mail = self._team.mail
        while mail:
            peer, message = mail.popleft()
            try:
                self._receive_message(peer, message)
            except NOT_OURS:
                self._team.blocks.distrust(peer)
        if self._moving:
            self._moving = [movement for movement in self._moving if not self._has_arrived(movement)]

    def close(self) -> None:
        """Leave pending transfers to the team. Local."""
        self._team.abandon([(movement.requests, movement.operation) for movement in self._moving])

    # ---- messages ------------------------------------------------------------------------------------

    def _send_record(
        self, peer: int, kind: _Kind, number: int, tag: int, label: Label | None, num_bytes: int, data: bytes = b""
    ) -> None:
        text = b"" if label is None else label.encode()[:_LABEL_BYTES]
        self._team.send_message(peer, _HEADER.pack(kind, number, tag, num_bytes, len(text)) + text + data)
        self.num_records += 1

    def _receive_message(self, peer: int, message: bytes) -> None:
        """Process a message.

        Raises:
            ValueError, LookupError, struct.error: the message cannot come from a rank.
        """
        kind, number, tag, num_bytes, label_bytes = _HEADER.unpack_from(message)
        start = _HEADER.size + label_bytes
        text = message[_HEADER.size : start]
        its = self._peers[peer]
        self.num_records += 1
        if kind == _Kind.EAGER:
            if num_bytes != len(message) - start:
                raise ValueError(f"{len(message) - start} bytes of {num_bytes}")
            # In a bytearray, because torch needs writable memory.
            data = torch.frombuffer(bytearray(message), dtype=torch.uint8)[start:]
            self._match(Incoming(peer, tag, _decode_label(text), num_bytes, number, data))
        elif kind == _Kind.ANNOUNCE:
            self._match(Incoming(peer, tag, _decode_label(text), num_bytes, number, announced=True))
        elif kind == _Kind.GRANT:
            # Even for a send that was abandoned meanwhile: the receiver has allocated memory for it, in this order.
            send = its.announced.pop(number)
            movement = _Movement(send, number, self._team.start_send(peer, send.flat))
            its.granted[number] = movement
            self._moving.append(movement)
        elif kind == _Kind.REFUSE:
            self._finish(its.announced.pop(number), _decode_label(text))
        elif kind == _Kind.CONFIRM:
            its.granted.pop(number).confirmed = True
        else:
            raise ValueError(f"a message of kind {kind}")

    def deliver(self, receive: Receive, arrival: Incoming) -> None:
        """Copy a message that is already here; grant or refuse one that is not."""
        receive.peer = arrival.peer
        # A label may agree although the size does not, if the message does not come from a rank.
        is_fit = arrival.num_bytes == receive.flat.numel() and arrival.label.fits(receive.label)
        conflict = None if is_fit else arrival.label
        if arrival.announced:
            if conflict is None:
                requests = self._team.start_receive(arrival.peer, receive.flat)
                self._moving.append(_Movement(receive, arrival.number, requests))
                self._send_record(arrival.peer, _Kind.GRANT, arrival.number, 0, None, 0)
                return
            self._send_record(arrival.peer, _Kind.REFUSE, arrival.number, 0, receive.label, 0)
        elif arrival.own is not None:
            if conflict is None:
                receive.flat.copy_(arrival.own.flat)
            self._finish(arrival.own, None if conflict is None else receive.label)
        elif conflict is None:
            assert isinstance(arrival.data, torch.Tensor)
            receive.flat.copy_(arrival.data)
        self._finish(receive, conflict)

    def _has_arrived(self, movement: _Movement[RequestT]) -> bool:
        """Whether a granted message has arrived completely, which ends it on this side."""
        if not self._team.are_done(movement.requests):
            return False
        operation = movement.operation
        if isinstance(operation, Receive):
            assert operation.peer is not None
            self._send_record(operation.peer, _Kind.CONFIRM, movement.number, 0, None, 0)
        elif not movement.confirmed:
            return False
        self._finish(operation)
        self.num_records += 1
        return True
