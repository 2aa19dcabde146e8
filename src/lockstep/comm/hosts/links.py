"""The connections between the ranks of a group over several hosts: one for each pair.

They carry short messages, and tell of the end of a process: when a process dies, the kernel closes its side, and the
peer reads that at once. If a whole host vanishes, keepalive probes find it out within half a minute.
`peer_listener.py` makes the connections.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["Links"]

_LENGTH = struct.Struct("!I")
_BUFFER_BYTES = 1 << 20
_READ_BYTES = 64 << 10
_LONGEST_MESSAGE_BYTES = 64 << 10
# A peer whose host has vanished: 10 s of silence, then 3 probes 5 s apart.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_FLUSH_S = 2.0


class _Link:
    """One connection, with the part of a message that has come, and the bytes that could not be sent yet."""

    def __init__(self, peer: int, link: socket.socket) -> None:
        self.peer = peer
        self.socket = link
        self.received = bytearray()
        self.unsent: deque[memoryview] = deque()


class Links:
    """The connections of one rank. Not thread-safe, apart from `wait` and `interrupt`.

    Args:
        sockets: the connected socket of each other rank.

    Attributes:
        lost: ranks whose end of the connection is closed.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self.lost: set[int] = set()
        self._links: dict[int, _Link] = {}
        self._by_descriptor: dict[int, _Link] = {}
        self._poll = select.epoll()
        self._interrupts = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._interrupts, select.EPOLLIN)
        self._sleepers: set[int] = set()  # threads in `wait`
        self._full: set[_Link] = set()  # those with bytes that could not be sent yet
        self._put_back: deque[tuple[int, memoryview]] = deque()
        for peer, one in sockets.items():
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            link = self._links[peer] = self._by_descriptor[one.fileno()] = _Link(peer, one)
            self._poll.register(link.socket, select.EPOLLIN)

    def send(self, peer: int, message: bytes) -> None:
        """Send a message, or as much of it as the connection takes; `poll` sends the rest."""
        link = self._links[peer]
        link.unsent.append(memoryview(_LENGTH.pack(len(message)) + message))
        self._flush(link)

    def _flush(self, link: _Link) -> None:
        while link.unsent:
            try:
                sent = link.socket.send(link.unsent[0])
            except (BlockingIOError, InterruptedError):
                self._full.add(link)
                return
            except OSError:
                link.unsent.clear()  # Messages that came before may still be there to read.
                break
            if sent < len(link.unsent[0]):
                link.unsent[0] = link.unsent[0][sent:]
            else:
                link.unsent.popleft()
        self._full.discard(link)

    def poll(self) -> Iterator[tuple[int, memoryview]]:
        """The messages that have come, as (rank, bytes)."""
        while self._put_back:
            yield self._put_back.popleft()
        for link in tuple(self._full):
            self._flush(link)
        try:
            ready = self._poll.poll(0)
        except (OSError, ValueError):  # closed
            return
        for descriptor, _ in ready:
            if descriptor != self._interrupts:
                link = self._by_descriptor[descriptor]
                self._read(link)
                yield from self._take(link)

    def put_back(self, messages: Iterable[tuple[int, memoryview]]) -> None:
        """Have the next `poll` yield these messages first, and the next `wait` not sleep. Local."""
        self._put_back.extend(messages)
        if self._put_back:
            self.interrupt()

    def sources(self) -> dict[int, str]:
        """From which address each rank is connected, as this host sees it. Local."""
        return {peer: str(link.socket.getpeername()[0]) for peer, link in self._links.items()}

    def _read(self, link: _Link) -> None:
        try:
            data = link.socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            link.received += data
        else:
            self.lost.add(link.peer)
            with contextlib.suppress(OSError, ValueError):
                self._poll.unregister(link.socket)

    def _take(self, link: _Link) -> Iterator[tuple[int, memoryview]]:
        start, received = 0, link.received
        while len(received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, start)
            if length > _LONGEST_MESSAGE_BYTES:
                self.lost.add(link.peer)  # No rank sends that.
                break
            end = start + _LENGTH.size + length
            if len(received) < end:
                break
            yield link.peer, memoryview(bytes(received[start + _LENGTH.size : end]))
            start = end
        if start:
            del received[:start]

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something to read, another thread interrupts, or the time is up."""
        self._sleepers.add(threading.get_ident())
        try:
            with contextlib.suppress(OSError, ValueError):
                if any(descriptor == self._interrupts for descriptor, _ in self._poll.poll(timeout_s)):
                    os.eventfd_read(self._interrupts)
        finally:
            self._sleepers.discard(threading.get_ident())

    @property
    def has_sleepers(self) -> bool:
        """Whether a thread is in `wait`."""
        return bool(self._sleepers)

    def interrupt(self) -> None:
        """End the sleep of another thread, or the next one. Local."""
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._interrupts, 1)

    def close(self) -> None:
        """Send the rest, within two seconds, and close."""
        deadline = time.monotonic() + _FLUSH_S
        while self._full and time.monotonic() < deadline:
            for link in tuple(self._full):
                self._flush(link)
            time.sleep(0.001)
        for link in self._links.values():
            # Unread data would make the kernel reset the connection, and the peer might lose our last message.
            with contextlib.suppress(OSError):
                while link.socket.recv(_READ_BYTES):
                    pass
            link.socket.close()
        self._poll.close()
        os.close(self._interrupts)
