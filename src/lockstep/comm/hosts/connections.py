"""The connections between this process and the other ranks, one for each pair, shared by all groups.

When a process dies, the kernel closes its side of a connection, and the peer sees that at once. If a whole host
vanishes, keepalive probes detect it within half a minute; but while there is unacknowledged data, the kernel
retransmits for a quarter of an hour instead of probing. So `lose_silent` checks whether the host answers at all.

[Note: shared connections] The default group connects its ranks; later groups use the same connections, so a further
group costs no connections and no handshakes here. Each message is preceded by the number of its group. Whichever group
reads, reads for all: a message for another group goes into that group's inbox, and ends its sleep. A message for a
group that this rank has not created yet is kept for it. A rank that leaves a group tells its peers, since the
connection stays open; for them it has left that group, as if a connection was closed. The last group closes the
connections.

[Note: unsent bytes] A peer that computes reads nothing, and data that the kernel does not accept meanwhile is kept
here. A thread sends it as soon as there is room, since the sender may be computing as well, or never get here again; it
runs as long as there is something to send.

[Note: signals] A signal handler may raise wherever Python calls a function, even in the middle of `receive`; a message
lost or read twice because of it would go unnoticed. So each step from the socket to an inbox is either one call into C,
which no handler interrupts, or one assignment; and the next `receive` resumes where the last one stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import Protocol

from lockstep.errors import NotInitialized

__all__ = ["LONGEST_MESSAGE_BYTES", "Connections", "Inbox", "Message"]

_HEAD = struct.Struct("!IQ")  # size of the message in bytes, and its group
_LEFT = 0xFFFFFFFF  # in place of the size: the rank has left that group
_BUFFER_BYTES = 1 << 20
_READ_BYTES = 64 << 10
LONGEST_MESSAGE_BYTES = 128 << 10
# Detects a vanished host: 10 s of silence, then 3 probes 5 s apart.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_SILENT_MS = 25_000
_ASKED_AT_LEAST = 3
_LOOK_FOR_SILENT_EVERY_S = 1.0
# The head of Linux' `struct tcp_info`. Used are the number of retransmits of the oldest bytes and of unanswered probes,
# the number of unacknowledged segments, and the milliseconds since the last acknowledgement.
_TCP_INFO = struct.Struct("=8B13I")
_SENT_AGAIN, _PROBES, _UNACKNOWLEDGED, _SINCE_ANSWER_MS = 2, 3, 12, 20
_LOOK_AFTER_UNSENT_EVERY_S = 0.2

# Sender's rank in the group that connected them; the message, or None after the last message of a rank that has left;
# and the number of the group.
Message = tuple[int, memoryview | None, int]

_take_first = operator.methodcaller("popleft")


class Inbox(Protocol):
    """The interface of a group that uses the connections.

    Attributes:
        messages: messages received for the group.
    """

    messages: deque[Message]

    def expect(self, connection: socket.socket) -> None:
        """Wait for this connection as well."""

    def forget(self, connection: socket.socket) -> None:
        """Stop waiting for this connection, which the other end has closed."""

    def interrupt(self) -> None:
        """Wake the group: something has arrived."""


class _Connection:
    """The connection to one other rank, with data received and data still to be sent.

    Attributes:
        peer: the rank at the other end.
        socket: connected, and non-blocking.
        source: the address of the other end.
        came: bytes not parsed yet, and messages not in an inbox yet. See [Note: signals].
        unsent: data that could not be sent yet.
    """

    def __init__(self, peer: int, connected: socket.socket) -> None:
        self.peer = peer
        self.socket = connected
        self.source = str(connected.getpeername()[0])
        self.came: tuple[bytearray, deque[Message]] = bytearray(), deque()
        self.unsent = bytearray()

    def read(self) -> bool:
        """Read available bytes; returns whether the connection is open."""
        received, _ = self.came
        before = len(received)
        try:
            deque(map(received.extend, map(self.socket.recv, (_READ_BYTES,))), maxlen=0)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        return len(received) > before

    def parse(self) -> None:
        """Extract complete messages from the received bytes.

        Raises:
            _NotOursError: the data cannot come from a rank.
        """
        received, messages = self.came
        start, found = 0, messages.copy()
        while len(received) - start >= _HEAD.size:
            length, group = _HEAD.unpack_from(received, start)
            if length != _LEFT and length > LONGEST_MESSAGE_BYTES:
                self.came = bytearray(), found
                raise _NotOursError
            begin = start + _HEAD.size
            end = begin if length == _LEFT else begin + length
            if len(received) < end:
                break
            found.append((self.peer, None if length == _LEFT else memoryview(bytes(received[begin:end])), group))
            start = end
        if start:
            self.came = received[start:], found

    def send(self) -> None:
        """Send pending data, as much as the connection accepts.

        Raises:
            OSError: it accepts nothing now, or never again.
        """
        while self.unsent:
            # Each send deletes what was sent.
            deque(map(self.unsent.__delitem__, map(slice, map(self.socket.send, (self.unsent,)))), maxlen=0)

    def is_silent(self) -> bool:
        """Whether its host has not answered several requests for a long time."""
        try:
            info = _TCP_INFO.unpack(self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        except (OSError, struct.error):
            return False
        # A host without room for more data is probed now and then; while it answers, that counts from 0.
        asked = max(info[_SENT_AGAIN] if info[_UNACKNOWLEDGED] else 0, info[_PROBES])
        return bool(asked >= _ASKED_AT_LEAST and info[_SINCE_ANSWER_MS] >= _SILENT_MS)


class Connections:
    """The connections of one process. Thread-safe. See [Note: shared connections].

    Args:
        sockets: connected socket of each other rank, by its rank in the group that connected them.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._lock = threading.RLock()
        self._connections: dict[int, _Connection] = {}
        self._by_descriptor: dict[int, _Connection] = {}
        self._poll = select.epoll()
        self._begun: set[_Connection] = set()  # may hold data that is in no inbox yet
        self._full: set[_Connection] = set()  # have unsent bytes
        self._sender: threading.Thread | None = None  # sends these bytes
        self._lost: set[int] = set()
        self._look_for_silent_at_s = 0.0
        self._inboxes: dict[int, tuple[Inbox, frozenset[int]]] = {}  # by group, with its peers
        self._early: dict[int, deque[Message]] = {}  # for groups that do not exist here yet
        self._closed: set[int] = set()  # groups
        self._made: Counter[str] = Counter()
        for peer, one in sockets.items():
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            connection = self._connections[peer] = self._by_descriptor[one.fileno()] = _Connection(peer, one)
            self._poll.register(connection.socket, select.EPOLLIN)

    def number_of(self, name: str) -> int:
        """A number for a further group, the same on all ranks that created equally many groups of that name. Local."""
        with self._lock:
            self._made[name] += 1
            text = f"{name}/{self._made[name]}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def open(self, group: int, inbox: Inbox, peers: Collection[int]) -> None:
        """Deliver messages to a group from now on, beginning with those that came early.

        Raises:
            NotInitialized: the last group has closed the connections.
        """
        with self._lock:
            if self._poll.closed:
                raise NotInitialized("the default group of this process was shut down, so no group can be made of it")
            self._inboxes[group] = inbox, frozenset(peers)
            inbox.messages.extend(message for message in self._early.pop(group, ()) if message[0] in peers)
            inbox.messages.extend((peer, None, group) for peer in self._lost.intersection(peers))
            for peer in set(peers) - self._lost:
                inbox.expect(self._connections[peer].socket)

    def source(self, peer: int) -> str:
        """Address from which that rank is connected, as this host sees it. Local."""
        return self._connections[peer].source

    # ---- sending ---------------------------------------------------------------------------------------

    def send(self, group: int, peer: int, message: bytes | memoryview) -> None:
        """Send a message, or as much of it as the connection accepts, and the rest later. See [Note: unsent bytes]."""
        with self._lock:
            self._send(self._connections[peer], _HEAD.pack(len(message), group) + message)

    def _send(self, connection: _Connection, data: bytes) -> None:
        connection.unsent.extend(data)
        if connection not in self._full:
            self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        try:
            connection.send()
        except (BlockingIOError, InterruptedError):
            self._full.add(connection)
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_the_rest, name="lockstep-send", daemon=True)
                self._sender.start()
            return
        except OSError:
            connection.unsent.clear()  # messages that arrived before may still be readable
        self._full.discard(connection)

    def _send_the_rest(self) -> None:
        poll = select.poll()
        known: dict[int, _Connection] = {}
        while True:
            for descriptor, _ in poll.poll(_LOOK_AFTER_UNSENT_EVERY_S * 1000 if known else 0):
                with self._lock:
                    if known[descriptor] in self._full:
                        self._flush(known[descriptor])
            with self._lock:
                if not self._full or self._poll.closed:
                    self._sender = None
                    return
                full = {connection.socket.fileno(): connection for connection in self._full}
            for descriptor in known.keys() - full.keys():
                poll.unregister(descriptor)
            for descriptor in full.keys() - known.keys():
                poll.register(descriptor, select.POLLOUT)
            known = full

    # ---- receiving -------------------------------------------------------------------------------------

    def receive(self, reader: Inbox) -> None:
        """Move received messages into the inboxes of all groups, and wake those other than the reader. Does not wait.

        See [Note: signals].
        """
        woken: set[Inbox] = set()
        with self._lock:
            try:
                ready = self._poll.poll(0)
            except (OSError, ValueError):  # closed
                return
            if not ready and not self._begun:
                return
            self._begun.update(self._by_descriptor[descriptor] for descriptor, _ in ready)
            try:
                for connection in tuple(self._begun):
                    self._receive_from(connection, woken)
                    self._begun.discard(connection)
            finally:
                woken.discard(reader)
                for inbox in woken:
                    inbox.interrupt()

    def _receive_from(self, connection: _Connection, woken: set[Inbox]) -> None:
        is_open = connection.read()
        try:
            connection.parse()
        except _NotOursError:
            is_open = False
        _, messages = connection.came
        while messages:
            peer, _, group = messages[0]
            inbox, peers = self._inboxes.get(group, (None, frozenset[int]()))
            if inbox is not None and peer in peers:
                woken.add(inbox)
                inbox.messages.extend(map(_take_first, (messages,)))
            elif inbox is None and group not in self._closed:
                self._early.setdefault(group, deque()).extend(map(_take_first, (messages,)))
            else:
                messages.popleft()
        if not is_open:
            self._lose(connection, woken)

    def _lose(self, connection: _Connection, woken: set[Inbox]) -> None:
        for group, (inbox, peers) in self._inboxes.items():
            if connection.peer in peers:
                inbox.messages.append((connection.peer, None, group))
                inbox.forget(connection.socket)
                woken.add(inbox)
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(connection.socket)
            connection.socket.shutdown(socket.SHUT_RDWR)  # If it is still open, its peer learns that nobody reads it.
        self._lost.add(connection.peer)
        connection.unsent.clear()
        self._full.discard(connection)

    def lose_silent(self) -> None:
        """Treat ranks whose hosts no longer answer as gone. Local; checks at most once a second."""
        now_s = time.monotonic()
        if now_s < self._look_for_silent_at_s:
            return
        self._look_for_silent_at_s = now_s + _LOOK_FOR_SILENT_EVERY_S
        woken: set[Inbox] = set()
        with self._lock:
            for peer, connection in self._connections.items():
                if peer not in self._lost and connection.is_silent():
                    self._lose(connection, woken)
        for inbox in woken:
            inbox.interrupt()

    # ---- end -------------------------------------------------------------------------------------------

    def decline(self, group: int, peers: Collection[int]) -> None:
        """Tell the others that this rank will not join a group, which it has not opened. Local."""
        with self._lock:
            self._closed.add(group)
            self._early.pop(group, None)
            if not self._poll.closed:
                self._send_left(group, peers)

    def _send_left(self, group: int, peers: Collection[int]) -> None:
        for peer in set(peers) - self._lost:
            self._send(self._connections[peer], _HEAD.pack(_LEFT, group))

    def close(self, group: int, patience_s: float) -> None:
        """Leave a group. The last one closes the connections, once the peers have received what they were sent.

        Args:
            group: the number of the group.
            patience_s: seconds until peers that receive nothing are given up.
        """
        with self._lock:
            _, peers = self._inboxes.pop(group)
            self._closed.add(group)
            self._send_left(group, peers)
            is_last = not self._inboxes
        deadline = time.monotonic() + patience_s
        while is_last and self._full and time.monotonic() < deadline:
            self.lose_silent()
            time.sleep(0.001)
        if is_last:
            self._end()

    def _end(self) -> None:
        with self._lock:
            if self._inboxes:  # Another thread has created a group meanwhile.
                return
            self._poll.close()
            for connection in self._connections.values():
                # Unread data would make the kernel reset the connection, and the peer might lose our last message.
                with contextlib.suppress(OSError):
                    while connection.socket.recv(_READ_BYTES):
                        pass
                connection.socket.close()

    def disown(self) -> None:
        """In a forked child: release the connections, so that they end with the parent. Local."""
        self._poll.close()
        for connection in self._connections.values():
            connection.socket.close()


class _NotOursError(Exception):  # never leaves the module
    """The data cannot come from a rank."""
