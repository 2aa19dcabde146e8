"""The base class of the teams over MPI and over several hosts, whose ranks exchange messages.

`MessageTeam` sends control messages to all peers, waits for theirs until a deadline, and sends a final one when this
rank leaves. Subclasses transfer the bytes.

[Note: one channel] All short messages of a group (the control messages of `notices.py`, and those of point to point) go
through one channel for each pair of ranks, and arrive in the order in which they were sent; a rank's last message is
its final control message. A rank that waits for anything receives them, so any wait notices a rank that failed.

[Note: arrival] A rank enters a collective by sending its record to the others (`arrival.py`), and continues when it has
received those of all. Only then do tensors move, straight between the memories of users, in messages whose sizes all
ranks know. The final message of a rank that gives up contains the number of collectives that it has finished, so a peer
knows whether the data that it still waits for will come.

[Note: attachments] The record reaches every rank anyway. So a rank may attach its part of a small collective to it, and
once all have arrived, all have everything and no tensor moves. Attachments are read only after the records have been
compared.

[Note: the dead and their notices] If ranks forward control messages, the message of a rank that has finished and exited
may still be in transit, and a rank that dies may hold back messages of others. So an arrival checks all ranks; a rank
that is gone and whose final message does not come within `_NOTICE_FOLLOWS_WITHIN_S` counts as lost.
"""

from __future__ import annotations

import abc
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

import torch

from lockstep.comm.contract import Waiter
from lockstep.comm.messages.arrival import LARGEST_ATTACHMENT_BYTES, Arrival, Entries, Forwarding, attachment_bytes
from lockstep.comm.messages.notices import (
    NOT_OURS,
    NOTICE_BYTES,
    MessageControlBlocks,
    NoticeKind,
    forwarded_notices,
    notice_kind,
)
from lockstep.errors import InputError
from lockstep.shm.control_blocks import Failure
from lockstep.shm.liveness import PeerIdentity, Watch
from lockstep.shm.sync import FailureKind, PeerFailure, PeerState
from lockstep.shm.team import Region

__all__ = ["MESSAGE_BYTES", "MessageTeam", "Parts", "RequestT"]

# Tensors, each with the peer that it is sent to or received from.
Parts = Sequence[tuple[int, torch.Tensor]]

# The team's handle of a pending send or receive.
RequestT = TypeVar("RequestT")

# Maximum length of a message in the channel, control messages included.
MESSAGE_BYTES = 8 << 10
_NOTICE_FOLLOWS_WITHIN_S = 0.25
assert MESSAGE_BYTES >= NOTICE_BYTES + LARGEST_ATTACHMENT_BYTES

_ALIGNMENT_BYTES = 64


class MessageTeam(abc.ABC, Generic[RequestT]):
    """The ranks of one group, for an engine, a flight record and point to point: a `Team` of `comm/contract.py`.

    Its waits cannot be observed by other ranks, and alarms do not wake them.

    Args:
        rank: this rank in the group.
        identities: the process of each rank.
        watch: monitors whether the peers are alive, as far as it can be seen from here.
        near: the ranks of this rank's host, itself included, in order; default itself alone.

    Attributes:
        peers: all other ranks, starting with the next, so that not all ranks address the same one first.
        blocks: the control blocks of all ranks, as far as their control messages have arrived.
        lock: held while messages are received or sent.
        mail: received point-to-point messages, as (rank, bytes), in order.
        attachment_bytes: maximum size of an attachment. See [Note: attachments].
        forwardings: the forwarding steps of this rank; empty if each rank sends to all.
        longest_message_bytes: maximum length of a message for `send_message`.
    """

    shares_memory = False
    longest_message_bytes = MESSAGE_BYTES
    forwardings: Sequence[Forwarding] = ()
    has_symmetric_memory = False
    interface: str | None = None
    overseers = None
    published_waits = None
    failures_wake_waits = False
    num_alarms = 0

    def __init__(self, rank: int, identities: Sequence[PeerIdentity], watch: Watch, near: Sequence[int] = ()) -> None:
        self.rank = rank
        self.near = near or (rank,)
        self.world_size = len(identities)
        self.peers = [(rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self._others = tuple(sorted(self.peers))
        self.blocks = MessageControlBlocks(self.rank, identities, on_failure=self._send_failure)
        self.watch = watch
        self.lock = threading.RLock()
        self.mail: deque[tuple[int, bytes]] = deque()
        self.is_entering = False
        self.on_arrival: list[Callable[[], None]] = []
        self._finished = 0  # number of the last collective that this rank has finished
        self._waiting = ""  # the send or receive that this rank is waiting in; unknown to peers
        self._number = 0  # of the current collective
        self.attachment_bytes = attachment_bytes(self.world_size)
        self._relied_on: Sequence[int] = ()  # the ranks that may have to forward the messages that this one waits for
        self._missed_since_s = 0.0  # when one of them was found dead in this collective; 0 for none
        self._entries = Entries(self.world_size)
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.has_left = False
        self._is_listening = bool(self._others)

    # ---- what moves messages ---------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def waiter(self) -> Waiter:
        """Waits for the peers."""

    @abc.abstractmethod
    def send_message(self, peer: int, message: bytes | memoryview) -> None:
        """Send at most `longest_message_bytes` to a peer. Local."""

    @abc.abstractmethod
    def poll(self) -> None:
        """Receive pending messages. Local; does not wait."""

    @abc.abstractmethod
    def _wait(self, awaited: Callable[[], list[int]], timeout_s: float) -> None:
        """Wait until `awaited` returns no ranks; regularly calls `_look`, which may raise."""

    @property
    @abc.abstractmethod
    def _is_closed(self) -> bool:
        """Whether this rank has left the group."""

    @abc.abstractmethod
    def exchange(self, sends: Parts, receives: Parts, timeout_s: float) -> None:
        """Send and receive flat contiguous tensors, each to or from a peer. After `arrive`.

        Every tensor sent must match a receive of as many bytes on that peer, in the same order for each pair of ranks.

        Raises:
            PeerFailure: a peer failed, left, or was too late.
        """

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> None:
        """Copy the root's flat contiguous tensor to all ranks. After `arrive`.

        Raises:
            PeerFailure: a peer failed, left, or was too late.
        """
        if self.rank == root:
            self.exchange([(peer, tensor) for peer in self._others], [], timeout_s)
        else:
            self.exchange([], [(root, tensor)], timeout_s)

    @abc.abstractmethod
    def start_send(self, peer: int, tensor: torch.Tensor) -> list[RequestT]:
        """Start sending a flat contiguous tensor that the peer receives with `start_receive`. Local."""

    @abc.abstractmethod
    def start_receive(self, peer: int, tensor: torch.Tensor) -> list[RequestT]:
        """Start receiving a flat contiguous tensor, in the order of the peer's `start_send`. Local."""

    @abc.abstractmethod
    def are_done(self, requests: list[RequestT]) -> bool:
        """Whether these sends or receives have finished. Local; does not wait."""

    @abc.abstractmethod
    def abandon(self, memory: object) -> None:
        """Give up pending transfers, but keep the memory alive that they may still access. Local."""

    def _receive_message(self, peer: int, message: memoryview) -> None:
        kind = notice_kind(message)
        if kind is None:
            self.mail.append((peer, bytes(message)))
            return
        try:
            self._receive_notice(peer, kind, message)
        except NOT_OURS:
            self.blocks.distrust(peer)

    def _receive_notice(self, peer: int, kind: NoticeKind, message: memoryview) -> None:
        if kind is NoticeKind.FORWARDED:
            for rank, notice in forwarded_notices(message):
                self._receive_entry(rank, notice)
        elif kind is NoticeKind.ENTER:
            self._receive_entry(peer, message)
        elif kind is NoticeKind.JOINED:
            number, attachments = self.blocks.receive_joined(message)
            self._entries.add_joined(number, message, attachments)
        else:
            self.blocks.receive(peer, message)
            # The last message of every rank is a final one.
            self._is_listening = not self.blocks.all_final(self._others)

    def _receive_entry(self, peer: int, notice: memoryview) -> None:
        received = self.blocks.receive(peer, notice)
        if received is not None:
            number, attachment = received
            self._entries.add(peer, number, notice, attachment)

    # ---- collectives -----------------------------------------------------------------------------------

    def arrive(self, timeout_s: float, attachment: bytes = b"") -> None:
        """Wait until all ranks have arrived at this collective, unless they already have. See [Note: arrival].

        Args:
            timeout_s: seconds until a missing rank is an error.
            attachment: what `attached` returns on every rank; at most `attachment_bytes`.

        Raises:
            PeerFailure: a rank cannot arrive, or did not in time.
            CollectiveMismatch: the ranks' calls differ.
        """
        if not self.is_entering:
            return
        self._number = number = self.blocks.number(self.rank)
        self._entries.add(self.rank, number, self.blocks.enter_notice() + attachment, attachment)
        arrival = Arrival(
            self.rank,
            number,
            self._entries,
            self._others,
            self.forwardings,
            self.send_message,
            self.longest_message_bytes,
        )

        def awaited() -> list[int]:
            self.poll()
            return arrival.go_on()

        self._relied_on = self._others if self.forwardings else ()
        self._missed_since_s = 0.0
        try:
            self._wait(awaited, timeout_s)
        finally:
            self._relied_on = ()
        # A rank that arrived early may have given up since.
        gave_up = [peer for peer in self.blocks.finished if self._will_not_finish(peer) is FailureKind.FAILED]
        if gave_up:
            raise PeerFailure(dict.fromkeys(gave_up, FailureKind.FAILED), 0.0)
        self.is_entering = False
        for check in self.on_arrival:
            check()

    def attached(self, rank: int) -> bytes | memoryview:
        """The attachment of a rank's message for this collective. Local; after `arrive`."""
        return self._entries.attachment(rank, self._number)

    def note_finished(self, number: int) -> None:
        """Note that this rank has finished that collective; peers learn it from its final message. Local."""
        self._finished = number

    def realign(self) -> None:
        """Do nothing after a mismatch: no tensor has moved yet."""

    def allocate(self, part_bytes: int, timeout_s: float) -> Region:
        """Raise: ranks share no memory, unless a subclass provides some.

        Raises:
            InputError: always.
        """
        raise InputError("this group has no symmetric memory; use a lockstep group")

    def scratch(self, like: torch.Tensor) -> list[torch.Tensor]:
        """For each rank a tensor of `like`'s dtype and numel, in memory that the next call reuses. Local."""
        part_bytes = like.numel() * like.element_size()
        stride = -(-part_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self._scratch.numel() < stride * self.world_size:
            self._scratch = torch.empty(stride * self.world_size, dtype=torch.uint8, device="cpu")
        starts = [rank * stride for rank in range(self.world_size)]
        return [self._scratch[start : start + part_bytes].view(like.dtype) for start in starts]

    # ---- waiting ---------------------------------------------------------------------------------------

    def publish_waiting(self, text: str) -> None:
        """Record which send or receive this rank waits in; empty for none. Not sent to peers: too costly."""
        self._waiting = text

    def waiting(self, rank: int) -> str:
        """The send or receive that this rank waits in; empty for none, and for other ranks."""
        return self._waiting if rank == self.rank else ""

    def _look(self, ranks: Sequence[int], waited_s: float, timeout_s: float) -> None:
        """Raise PeerFailure if one of these ranks will not do its part in this collective."""
        if self._is_closed:
            raise PeerFailure({self.rank: FailureKind.CLOSED}, waited_s)
        concerned = {*ranks, *self._relied_on}
        kinds = {rank: kind for rank in concerned if (kind := self._will_not_finish(rank)) is not None}
        if not kinds:
            kinds = dict.fromkeys(self._find_dead(concerned), FailureKind.DEAD)
        if not kinds and waited_s >= timeout_s:
            kinds = dict.fromkeys(ranks, FailureKind.LATE)
        if kinds:
            raise PeerFailure(kinds, waited_s)

    def _find_dead(self, ranks: Collection[int]) -> set[int]:
        """Those of these ranks that died before they had finished this collective."""
        gone = self.watch.dead().intersection(ranks)
        if gone:
            self.poll()  # a rank that left sent its final message before it ended
            gone = {rank for rank in gone if not self._has_finished(rank)}
        if gone and self._relied_on:  # see [Note: the dead and their notices]
            now = time.monotonic()
            self._missed_since_s = self._missed_since_s or now
            return gone if now - self._missed_since_s > _NOTICE_FOLLOWS_WITHIN_S else set()
        return gone

    def _has_finished(self, rank: int) -> bool:
        """Whether a rank's final message says that it has finished this collective; then its data is in transit."""
        return self.blocks.finished.get(rank, -1) >= self._number

    def _will_not_finish(self, rank: int) -> FailureKind | None:
        """How a rank failed that did not finish this collective, according to its final message; None for others."""
        if rank not in self.blocks.finished or self._has_finished(rank):
            return None
        return FailureKind.FAILED if self.blocks.state(rank) == PeerState.FAILED else FailureKind.LEFT

    # ---- end -------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def close(self) -> None:
        """Leave, in good order unless this rank has failed. Local; peers that still need it raise RankLost."""

    def disown(self) -> None:
        """In a forked child: release what belongs to the parent. Local."""
        self.watch.close()

    def _send_failure(self, _: Failure) -> None:
        self._send_final_notice()

    def _send_final_notice(self) -> None:
        with self.lock:
            if not self.has_left:
                self.has_left = True
                notice = self.blocks.final_notice(self._finished)
                for peer in self._others:
                    self.send_message(peer, notice)

    @property
    def has_failed(self) -> bool:
        """Whether any rank has failed, in which case others may never leave this group."""
        return any(self.blocks.state(rank) == PeerState.FAILED for rank in range(self.world_size))
