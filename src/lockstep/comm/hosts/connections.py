"""The connections between this process and the other ranks, one for each pair, which several groups share.

When a process dies, the kernel closes its side of a connection, and the peer reads that at once. If a whole host
vanishes, keepalive probes find it out within half a minute.

[Note: shared connections] The default group connects its ranks; the groups that are made of them later use the same
connections, so a further group costs no connections here and no handshakes. Each message is preceded by the number of
its group. Whichever group reads, reads for all: what is for another group goes into that group's inbox, and ends its
sleep. What is for a group that this rank has not made yet waits for it. A rank that leaves a group tells its peers,
since the connection stays open; for them it is then gone from that group, as when a connection is closed. The last
group closes the connections.
"""

from __future__ import annotations

import contextlib
import hashlib
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

__all__ = ["Connections", "Inbox"]

_HEAD = struct.Struct("!IQ")  # bytes of the message, and its group
_LEFT = 0xFFFFFFFF  # instead of the bytes: the rank has left that group
_BUFFER_BYTES = 1 << 20
_READ_BYTES = 64 << 10
_LONGEST_MESSAGE_BYTES = 64 << 10
# A peer whose host has vanished: 10 s of silence, then 3 probes 5 s apart.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_FLUSH_S = 2.0


class Inbox(Protocol):
    """What the connections need of a group that uses them."""

    def deliver(self, peer: int, message: memoryview | None) -> None:
        """Take a message, or None after the last one: that rank is gone."""

    def forget(self, connection: socket.socket) -> None:
        """Wait for this connection no more: it is closed at its other end."""

    def interrupt(self) -> None:
        """End a sleep: something was delivered."""


class _Connection:
    """One connection, with the part of a message that has come, and the bytes that could not be sent yet."""

    def __init__(self, peer: int, connected: socket.socket) -> None:
        self.peer = peer
        self.socket = connected
        self.received = bytearray()
        self.unsent: deque[memoryview] = deque()


class Connections:
    """The connections of one process. Thread-safe. See [Note: shared connections].

    Args:
        sockets: the connected socket of each other rank, by its rank in the group that connected them.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._lock = threading.RLock()
        self._connections: dict[int, _Connection] = {}
        self._by_descriptor: dict[int, _Connection] = {}
        self._poll = select.epoll()
        self._full: set[_Connection] = set()  # those with bytes that could not be sent yet
        self._lost: set[int] = set()
        self._inboxes: dict[int, tuple[Inbox, frozenset[int]]] = {}  # by group, with its peers
        self._early: dict[int, list[tuple[int, memoryview | None]]] = {}  # for groups that are not there yet
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
        """A number for a further group, the same on all ranks that make groups of that name equally often. Local."""
        with self._lock:
            self._made[name] += 1
            text = f"{name}/{self._made[name]}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def open(self, group: int, inbox: Inbox, peers: Collection[int]) -> list[socket.socket]:
        """Deliver to a group from here on, beginning with what has come early.

        Returns:
            The connections to these peers that are open, to be waited for.
        """
        with self._lock:
            self._inboxes[group] = inbox, frozenset(peers)
            for peer, message in self._early.pop(group, ()):
                inbox.deliver(peer, message)
            for peer in self._lost.intersection(peers):
                inbox.deliver(peer, None)
            return [self._connections[peer].socket for peer in peers if peer not in self._lost]

    def source(self, peer: int) -> str:
        """From which address that rank is connected, as this host sees it. Local."""
        return str(self._connections[peer].socket.getpeername()[0])

    # ---- sending ---------------------------------------------------------------------------------------

    def send(self, group: int, peer: int, message: bytes) -> None:
        """Send a message, or as much of it as the connection takes; `receive` sends the rest."""
        with self._lock:
            self._send(self._connections[peer], _HEAD.pack(len(message), group) + message)

    def _send(self, connection: _Connection, data: bytes) -> None:
        connection.unsent.append(memoryview(data))
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        while connection.unsent:
            try:
                sent = connection.socket.send(connection.unsent[0])
            except (BlockingIOError, InterruptedError):
                self._full.add(connection)
                return
            except OSError:
                connection.unsent.clear()  # Messages that came before may still be there to read.
                break
            if sent < len(connection.unsent[0]):
                connection.unsent[0] = connection.unsent[0][sent:]
            else:
                connection.unsent.popleft()
        self._full.discard(connection)

    # ---- receiving -------------------------------------------------------------------------------------

    def receive(self, reader: Inbox) -> None:
        """Deliver what has come, to all groups; those other than the reader are woken. Waits for nothing."""
        woken: set[Inbox] = set()
        with self._lock:
            for connection in tuple(self._full):
                self._flush(connection)
            try:
                ready = self._poll.poll(0)
            except (OSError, ValueError):  # closed
                return
            for descriptor, _ in ready:
                connection = self._by_descriptor[descriptor]
                is_open = self._read(connection)
                try:
                    for group, message in self._take(connection):
                        self._deliver(group, connection.peer, message, woken)
                except _NotOursError:
                    is_open = False
                if not is_open:
                    self._lose(connection, woken)
            woken.discard(reader)
            for inbox in woken:
                inbox.interrupt()

    def _read(self, connection: _Connection) -> bool:
        """Read what has come; whether the connection is open."""
        try:
            data = connection.socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        connection.received += data
        return bool(data)

    def _take(self, connection: _Connection) -> Iterator[tuple[int, memoryview | None]]:
        """The messages that have come whole, each with its group; None for the end of a group."""
        start, received = 0, connection.received
        while len(received) - start >= _HEAD.size:
            length, group = _HEAD.unpack_from(received, start)
            if length == _LEFT:
                start += _HEAD.size
                yield group, None
                continue
            if length > _LONGEST_MESSAGE_BYTES:
                raise _NotOursError
            end = start + _HEAD.size + length
            if len(received) < end:
                break
            yield group, memoryview(bytes(received[start + _HEAD.size : end]))
            start = end
        if start:
            del received[:start]

    def _deliver(self, group: int, peer: int, message: memoryview | None, woken: set[Inbox]) -> None:
        inbox, peers = self._inboxes.get(group, (None, frozenset[int]()))
        if inbox is not None and peer in peers:
            inbox.deliver(peer, message)
            woken.add(inbox)
        elif inbox is None and group not in self._closed:
            self._early.setdefault(group, []).append((peer, message))

    def _lose(self, connection: _Connection, woken: set[Inbox]) -> None:
        self._lost.add(connection.peer)
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(connection.socket)
        for inbox, peers in self._inboxes.values():
            if connection.peer in peers:
                inbox.deliver(connection.peer, None)
                inbox.forget(connection.socket)
                woken.add(inbox)

    # ---- end -------------------------------------------------------------------------------------------

    def close(self, group: int) -> None:
        """Leave a group: send the rest, within two seconds. The last group closes the connections."""
        with self._lock:
            _, peers = self._inboxes.pop(group)
            self._closed.add(group)
            is_last = not self._inboxes
            left = [self._connections[peer] for peer in peers if peer not in self._lost]
            for connection in left:
                self._send(connection, _HEAD.pack(_LEFT, group))
        deadline = time.monotonic() + _FLUSH_S
        while self._full.intersection(left) and time.monotonic() < deadline:
            with self._lock:
                for connection in tuple(self._full):
                    self._flush(connection)
            time.sleep(0.001)
        if is_last:
            self._end()

    def _end(self) -> None:
        with self._lock:
            for connection in self._connections.values():
                # Unread data would make the kernel reset the connection, and the peer might lose our last message.
                with contextlib.suppress(OSError):
                    while connection.socket.recv(_READ_BYTES):
                        pass
                connection.socket.close()
            self._poll.close()


class _NotOursError(Exception):  # never leaves the module
    """No rank sends that."""
