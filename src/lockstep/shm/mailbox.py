"""Point to point on one host: the sends and receives of one rank, moved through the rings of its pairs.

[Note: eager or announced] A small message travels in a record of the ring (`ring.py`), and its send completes as soon
as it is written; a receiver that does not need it yet keeps a copy. What a receiver must keep is bounded: it publishes
how many bytes it has delivered, and a sender that is too far ahead of that, or whose message is large, only *announces*
the message. The receiver *grants* it when a receive matches, and then the sender streams it through chunks of its pool
(`pool.py`). The first chunk is sent with the announcement if one is free, so that a message of one chunk needs no round
trip when the receiver is ready.

[Note: nothing blocks a ring] A rank that has anything pending with a peer reads all records from that peer, of every
kind: eager messages into bounded memory, announcements into a queue no longer than what the peer has pending. So a
grant is never stuck after a record that cannot be read, and sends and receives that can finish in some order do finish.

[Note: labels] Each message states its dtype, shape and the line of its send. These repeat, so they are written once for
each peer and then referenced by a number. A receiver resolves the number as it reads, so a number can be reassigned to
another label later.

This module does not wait: `progress` does what can be done now. `lockstep.comm.p2p` calls it, decides for how long, and
handles ranks that are gone. Not thread-safe.
"""

from __future__ import annotations

import errno
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from lockstep import env
from lockstep.errors import SegmentDamaged, SharedMemoryError
from lockstep.shm.base_mailbox import BaseMailbox
from lockstep.shm.control_blocks import damage_text
from lockstep.shm.doorbell import Doorbell
from lockstep.shm.mail_area import MailArea
from lockstep.shm.messages import ANY_SOURCE, Incoming, Label, Matcher, Receive, Send
from lockstep.shm.pool import CHUNK_BYTES, Pool, PoolView
from lockstep.shm.ring import Fields, RingReader, RingWriter, copy_bytes

__all__ = ["Mailbox"]

_LARGEST_DEBT_BYTES = 4 << 20  # limit of what a receiver may have to keep for each sender
_OVERHEAD_BYTES = 256  # per kept message, in addition to its payload
_NUM_LABELS = 64
_RECORDS_PER_READ = 64
_NO_CHUNK = -1
# Errors of this process, whatever the state of the peer.
_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class _RecordKind(IntEnum):
    """Kinds of records. The fields after the kind are: number, tag, num_bytes, label, chunk, chunk_bytes."""

    LABEL = 1  # the payload is the label that this number refers to from now on
    POOL = 2  # the payload is the handle of the sender's pool
    EAGER = 3  # the payload is the message
    ANNOUNCE = 4  # a message that waits for a grant; the chunk is its first piece
    CHUNK = 5  # the next piece of a granted message: in the chunk, or else the payload
    GRANT = 6  # to the sender of that number: continue
    REFUSE = 7  # to the sender of that number: the matching receive has that label, which does not agree


@dataclass(eq=False)
class _RingPeer:
    """What this rank knows about another one."""

    rank: int
    writer: RingWriter
    reader: RingReader
    # Records for which there was no room, in order, each with the send that completes when it is written.
    backlog: deque[tuple[Fields, torch.Tensor | None, Send | None]] = field(default_factory=deque)
    num_messages: int = 0  # sent to it so far
    eager_bytes: int = 0  # in eager messages sent to it, overhead included
    settled_bytes: int = 0  # of eager messages from it that have been delivered
    label_numbers: dict[Label, int] = field(default_factory=dict)  # as that rank knows them, oldest first
    labels: dict[int, Label] = field(default_factory=dict)  # as that rank has sent them
    knows_pool: bool = False
    pool: PoolView | None = None  # that rank's
    announced: dict[int, Send] = field(default_factory=dict)  # by number
    granted: dict[int, Receive] = field(default_factory=dict)  # by number


class Mailbox(BaseMailbox):
    """The messages of one rank.

    Args:
        area: the memory in which the rings lie.
        rank: this rank.
        world_size: number of ranks.
        local_ranks: index in the area of each rank that shares it, this one included; default the rank itself.
        matcher: matches messages and receives; passed if this is not the only mailbox of its rank.
        bell: wakes the ranks of the area; default a `Doorbell`.

    Attributes:
        pending: unfinished operations, in the order of the calls.
        num_records: number of records read and written so far; changes whenever messages move.
    """

    num_records = 0

    def __init__(
        self,
        area: MailArea,
        rank: int,
        world_size: int,
        local_ranks: Mapping[int, int] | None = None,
        matcher: Matcher | None = None,
        bell: Doorbell | None = None,
    ) -> None:
        super().__init__(matcher)
        self._area = area
        self._rank = rank
        self._local_ranks = {peer: peer for peer in range(world_size)} if local_ranks is None else local_ranks
        self._bell = Doorbell(area, self._local_ranks[rank]) if bell is None else bell
        self._touched: dict[int, bool] = {}  # peers to wake, and whether there is a record for them
        self._others = [peer for peer in self._local_ranks if peer != rank]
        self._peers: dict[int, _RingPeer] = {}
        self._streams: deque[Send] = deque()  # granted, but not completely written yet
        self.pending: dict[Send | Receive, None] = {}
        self._pending_with: Counter[int] = Counter()  # by rank or ANY_SOURCE
        self._eager_bytes = area.capacity // 4
        self._pool: Pool | None = None
        self._unmapped: dict[int, tuple[float, SharedMemoryError]] = {}
        # Peers open a pool some time after it was created. In a folder (LOCKSTEP_SHM_DIR) it would need its name until
        # then, and a kill would leave the name behind: there, messages are streamed through the rings.
        self._may_have_pool = env.LOCKSTEP_SHM_DIR.get() is None

    # ---- asked for from above ------------------------------------------------------------------------

    def send(self, peer: int, tag: int, label: Label, flat: torch.Tensor) -> Send:
        send = Send(tag, label, flat, peer=peer)
        self.pending[send] = None
        self._pending_with[peer] += 1
        if peer == self._rank:
            self._match(Incoming(peer, tag, label, flat.numel(), own=send))
            return send
        to = self._peer(peer)
        to.num_messages += 1
        send.number = to.num_messages
        number = self._label_number(to, label)
        cost = flat.numel() + _OVERHEAD_BYTES
        if flat.numel() <= self._eager_bytes and to.eager_bytes + cost - to.writer.settled <= _LARGEST_DEBT_BYTES:
            to.eager_bytes += cost
            self._write(to, (_RecordKind.EAGER, send.number, tag, flat.numel(), number, _NO_CHUNK, 0), flat, send)
        else:
            to.announced[send.number] = send
            chunk = self._fill_chunk(to, send, unclaimed=True) if flat.numel() else _NO_CHUNK
            self._write(to, (_RecordKind.ANNOUNCE, send.number, tag, flat.numel(), number, chunk, send.num_sent))
        self.ring()
        return send

    def expect(self, receive: Receive) -> None:
        self.pending[receive] = None
        self._pending_with[receive.source] += 1

    def progress(self) -> None:
        """Do what can be done now: read, match, copy, write. Local; does not wait.

        Raises:
            SharedMemoryError: a peer's pool cannot be mapped, because this process has no memory or descriptors left.
        """
        ranks = self._others if ANY_SOURCE in self._pending_with else list(self._pending_with)
        for rank in ranks:
            if rank != self._rank:
                peer = self._peer(rank)
                self._read(peer)
                self._flush(peer)
        if self._streams:
            self._stream()
        self.ring()

    @property
    def unmapped(self) -> Mapping[int, tuple[float, SharedMemoryError]]:
        return self._unmapped

    def ring(self) -> None:
        if self._touched:
            for rank, wrote in self._touched.items():
                self._bell.ring(self._local_ranks[rank], wrote=wrote)
            self._touched.clear()

    def arm(self) -> int:
        return self._bell.arm(self._wants_room())

    def is_armed(self, seen: int) -> bool:
        return self._bell.is_armed(seen, self._wants_room())

    def _wants_room(self) -> bool:
        return bool(self._streams) or any(peer.backlog for peer in self._peers.values())

    def sleep(self, seen: int, timeout_s: float, poll_s: float) -> None:
        self._bell.sleep(seen, timeout_s, poll_s)

    def wake_here(self) -> None:
        self._bell.ring_here()

    def close(self) -> None:
        """Close the file of the pool. Local; peers that have mapped it can still use it."""
        if self._pool is not None:
            self._pool.release()

    # ---- bookkeeping ---------------------------------------------------------------------------------

    def _peer(self, rank: int) -> _RingPeer:
        peer = self._peers.get(rank)
        if peer is None:
            area = self._area
            own, its = self._local_ranks[self._rank], self._local_ranks[rank]
            writer = RingWriter(area.segment, area.ring_start(own, its), area.capacity)
            reader = RingReader(area.segment, area.ring_start(its, own), area.capacity)
            peer = self._peers[rank] = _RingPeer(rank, writer, reader)
        return peer

    def forget(self, operation: Send | Receive) -> None:
        if operation not in self.pending:
            return
        del self.pending[operation]
        peer = operation.peer if isinstance(operation, Send) else operation.source
        self._pending_with[peer] -= 1
        if not self._pending_with[peer]:
            del self._pending_with[peer]

    def _label_number(self, to: _RingPeer, label: Label) -> int:
        """The number by which that peer knows a label. See [Note: labels]."""
        number = to.label_numbers.get(label)
        if number is None:
            number = len(to.label_numbers)
            if number == _NUM_LABELS:
                number = to.label_numbers.pop(next(iter(to.label_numbers)))
            to.label_numbers[label] = number
            data = label.encode()[: to.writer.largest_payload]
            self._write_text(to, (_RecordKind.LABEL, 0, 0, len(data), number, _NO_CHUNK, 0), data)
        return number

    # ---- matching ------------------------------------------------------------------------------------

    def _keep(self, arrival: Incoming) -> None:
        if arrival.data is not None and not arrival.announced:
            arrival.data = arrival.data.clone()  # it lies in the ring, whose room is needed
        self._matcher.keep(arrival)

    def deliver(self, receive: Receive, arrival: Incoming) -> None:
        """Copy what has arrived of a message, and arrange for the rest."""
        receive.peer = arrival.peer
        fits = arrival.label.fits(receive.label)
        if fits and arrival.data is not None:
            receive.num_received = copy_bytes(arrival.data, receive.flat)
        if arrival.own is not None:
            if fits:
                copy_bytes(arrival.own.flat, receive.flat)
            self._finish(arrival.own, None if fits else receive.label)
        elif arrival.announced:
            self._answer(receive, arrival, fits)
            if fits and receive.num_received < arrival.num_bytes:
                return
        else:
            self._settle(arrival)
        self._finish(receive, None if fits else arrival.label)

    def _answer(self, receive: Receive, arrival: Incoming, fits: bool) -> None:
        """Grant an announced message, or refuse it."""
        peer = self._peer(arrival.peer)
        if arrival.chunk is not None:
            assert peer.pool is not None
            peer.pool.hand_back(arrival.chunk)
        if not fits:
            number = self._label_number(peer, receive.label)
            self._write(peer, (_RecordKind.REFUSE, arrival.number, 0, 0, number, _NO_CHUNK, 0))
            return
        if receive.num_received < arrival.num_bytes:
            peer.granted[arrival.number] = receive
        self._write(peer, (_RecordKind.GRANT, arrival.number, 0, 0, 0, _NO_CHUNK, 0))

    def _settle(self, arrival: Incoming) -> None:
        peer = self._peer(arrival.peer)
        peer.settled_bytes += arrival.num_bytes + _OVERHEAD_BYTES
        peer.reader.settle(peer.settled_bytes)

    # ---- reading -------------------------------------------------------------------------------------

    def _read(self, peer: _RingPeer) -> None:
        """Process the records from a peer.

        Raises:
            SharedMemoryError: as `progress` does.
            SegmentDamaged: the records cannot come from a rank.
        """
        for _ in range(_RECORDS_PER_READ):
            fields = peer.reader.read()
            if fields is None:
                return
            try:
                self._take(peer, fields)
            except SharedMemoryError as error:
                if error.errno in _LACKING:
                    raise
                # The pool of an ended process is gone with it. The record stays, and is tried again.
                self._unmapped.setdefault(peer.rank, (time.monotonic(), error))
                return
            except (KeyError, ValueError, IndexError) as error:
                what = f"rank {peer.rank} seems to have sent {fields}"
                raise SegmentDamaged(damage_text(f"{what} ({type(error).__name__})"), (peer.rank,)) from None
            peer.reader.advance()
            self.num_records += 1
            self._touched.setdefault(peer.rank, False)

    def _take(self, peer: _RingPeer, fields: Fields) -> None:
        """Process one record."""
        reader = peer.reader
        kind, number, tag, num_bytes, label, chunk, chunk_bytes = fields
        if kind == _RecordKind.EAGER:
            data = reader.payload(num_bytes)
            self._match(Incoming(peer.rank, tag, peer.labels[label], num_bytes, number, data))
        elif kind == _RecordKind.ANNOUNCE:
            arrival = Incoming(peer.rank, tag, peer.labels[label], num_bytes, number, announced=True)
            if chunk != _NO_CHUNK:
                if peer.pool is None or chunk_bytes > num_bytes:
                    raise ValueError(chunk)  # the handle of a pool comes before its first chunk
                arrival.chunk, arrival.data = chunk, peer.pool.view(chunk, chunk_bytes)
            self._match(arrival)
        elif kind == _RecordKind.CHUNK:
            self._read_piece(peer, number, num_bytes, chunk)
        elif kind == _RecordKind.GRANT:
            self._go_on(peer.announced.pop(number))
        elif kind == _RecordKind.REFUSE:
            self._finish(peer.announced.pop(number), peer.labels[label])
        elif kind == _RecordKind.LABEL:
            peer.labels[label] = Label.decode(reader.payload(num_bytes).read())
        elif kind == _RecordKind.POOL:
            peer.pool = PoolView(reader.payload(num_bytes).read().decode())
            self._unmapped.pop(peer.rank, None)
        else:
            raise ValueError(kind)

    def _read_piece(self, peer: _RingPeer, number: int, num_bytes: int, chunk: int) -> None:
        """Copy the next piece of a granted message."""
        receive = peer.granted[number]
        if num_bytes > receive.flat.numel() - receive.num_received:
            raise ValueError(num_bytes)
        pool = peer.pool if chunk != _NO_CHUNK else None
        data = peer.reader.payload(num_bytes) if pool is None else pool.view(chunk, num_bytes)
        start, stop = receive.num_received, receive.num_received + num_bytes
        if not receive.done:
            copy_bytes(data, receive.flat[start:stop])
        receive.num_received = stop
        if pool is not None:
            pool.hand_back(chunk)
        if stop == receive.flat.numel():
            del peer.granted[number]
            self._finish(receive)

    # ---- writing -------------------------------------------------------------------------------------

    def _write(
        self, to: _RingPeer, fields: Fields, payload: torch.Tensor | None = None, send: Send | None = None
    ) -> None:
        """Write a record, after those that wait for room; `send` completes once it is written."""
        to.backlog.append((fields, payload, send))
        self._flush(to)

    def _write_text(self, to: _RingPeer, fields: Fields, data: bytes) -> None:
        self._write(to, fields, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _flush(self, to: _RingPeer) -> None:
        """Write waiting records for which there is room."""
        backlog = to.backlog
        while backlog:
            fields, payload, send = backlog[0]
            if not to.writer.write(fields, payload):
                self._bell.want_room()
                return
            backlog.popleft()
            self.num_records += 1
            self._touched[to.rank] = True
            if send is not None:
                self._finish(send)

    def _go_on(self, send: Send) -> None:
        """Continue a message that the peer has granted."""
        if send.num_sent == send.flat.numel():
            self._finish(send)
        else:
            self._streams.append(send)

    def _stream(self) -> None:
        """Write one piece of each granted message, as far as there is room."""
        for _ in range(len(self._streams)):
            send = self._streams.popleft()
            if send.done:
                continue  # abandoned
            to = self._peer(send.peer)
            if not to.backlog:
                self._write_piece(to, send)
            self._go_on(send)
        if self._streams:
            self._bell.want_room()

    def _write_piece(self, to: _RingPeer, send: Send) -> None:
        start = send.num_sent
        chunk = self._fill_chunk(to, send, unclaimed=False)
        if chunk != _NO_CHUNK:
            self._write(to, (_RecordKind.CHUNK, send.number, 0, send.num_sent - start, 0, chunk, 0))
        elif self._pool is None:
            piece = send.flat[start : start + self._eager_bytes]
            if to.writer.write((_RecordKind.CHUNK, send.number, 0, piece.numel(), 0, _NO_CHUNK, 0), piece):
                send.num_sent += piece.numel()
                self.num_records += 1
                self._touched[to.rank] = True

    def _fill_chunk(self, to: _RingPeer, send: Send, *, unclaimed: bool) -> int:
        """Copy the next piece of a message into a chunk of the pool; returns its number, or `_NO_CHUNK`."""
        pool = self._open_pool()
        chunk = None if pool is None else pool.take(unclaimed=unclaimed)
        if pool is None or chunk is None:
            return _NO_CHUNK
        if not to.knows_pool:
            to.knows_pool = True
            self._write_text(to, (_RecordKind.POOL, 0, 0, len(pool.handle), 0, _NO_CHUNK, 0), pool.handle.encode())
        piece = send.flat[send.num_sent : send.num_sent + CHUNK_BYTES]
        copy_bytes(piece, pool.view(chunk, piece.numel()))
        send.num_sent += piece.numel()
        return chunk

    def _open_pool(self) -> Pool | None:
        if self._pool is None and self._may_have_pool:
            try:
                self._pool = Pool()
            except SharedMemoryError:
                self._may_have_pool = False  # streams through the rings instead: slower, but needs no memory
        return self._pool
