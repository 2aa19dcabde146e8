"""Short messages between the ranks of one group over several hosts.

`Links` is one group's view of the connections (`connections.py`), which all groups of the process share. They also
report that a process has ended. `peer_listener.py` makes them, for the first group.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lockstep.comm.hosts.connections import Connections, Message

__all__ = ["Links"]


class Links:
    """The links of one rank in one group. Not thread-safe, except for `wait` and `interrupt`.

    Args:
        sockets: the connected socket of each other rank.

    Attributes:
        group: the number of the group among those over the same connections; the same on all ranks.
        lost: ranks that have left the group, once `poll` has yielded all their messages.
        messages: received messages, which the connections put here for `poll`.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._join(Connections(sockets), 0, {peer: peer for peer in sockets})

    def share(self, name: str, ranks: Sequence[int]) -> Links:
        """The links of a further group over the same connections. Called by all ranks of that group.

        Args:
            name: name of the group, the same on all its ranks. Several groups of one name must be created in the same
                order on all ranks.
            ranks: for each rank of that group, its rank in this one.

        Raises:
            NotInitialized: the last group over these connections was closed.
            OSError: this process has no descriptors left; the others see that it has left that group.
        """
        links = Links.__new__(Links)
        new_ranks = {self._peers[rank]: new for new, rank in enumerate(ranks) if rank in self._peers}
        group = self._connections.number_of(name)
        try:
            links._join(self._connections, group, new_ranks)
        except OSError:
            self._connections.decline(group, new_ranks)
            raise
        return links

    def _join(self, connections: Connections, group: int, ranks: Mapping[int, int]) -> None:
        self.lost: set[int] = set()
        self._connections = connections
        self.group = group
        self._ranks = dict(ranks)  # rank in this group of each peer of the connections
        self._peers = {rank: peer for peer, rank in ranks.items()}  # the inverse
        self.messages: deque[Message] = deque()
        self._sleepers: set[int] = set()  # ids of the threads in `wait`
        self._is_closed = False
        self._closing = threading.RLock()  # reentrant, because a signal handler may get here
        with contextlib.ExitStack() as stack:
            self._interrupts = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            stack.callback(os.close, self._interrupts)
            self._poll = stack.enter_context(select.epoll())
            self._poll.register(self._interrupts, select.EPOLLIN)
            connections.open(self.group, self, self._ranks)
            self._descriptors = stack.pop_all()

    def send(self, peer: int, message: bytes | memoryview) -> None:
        """Send a message, or as much of it as the connection accepts now, and the rest later. Local."""
        if not self._is_closed:
            self._connections.send(self.group, self._peers[peer], message)

    def poll(self) -> Iterator[tuple[int, memoryview]]:
        """Yield the messages that have arrived, as (rank, bytes)."""
        if not self._is_closed:
            self._connections.receive(self)
        while self.messages:
            peer, message, _ = self.messages.popleft()
            if message is None:
                self.lost.add(self._ranks[peer])
            else:
                yield self._ranks[peer], message

    def put_back(self, messages: Iterable[tuple[int, memoryview]]) -> None:
        """Make the next `poll` yield these messages first, and the next `wait` return at once. Local."""
        self.messages.extendleft((self._peers[rank], message, self.group) for rank, message in reversed(list(messages)))
        if self.messages:
            self.interrupt()

    def sources(self) -> dict[int, str]:
        """Address from which each rank is connected, as this host sees it. Local."""
        return {rank: self._connections.source(peer) for rank, peer in self._peers.items()}

    def lose_silent(self) -> None:
        """Treat ranks whose hosts no longer answer as gone, as the next `poll` will show. Local."""
        self._connections.lose_silent()

    # ---- for the connections: an `Inbox` ---------------------------------------------------------------

    def expect(self, connection: socket.socket) -> None:
        """Make `wait` return when that connection becomes readable. Local; any thread may call it."""
        self._poll.register(connection, select.EPOLLIN)

    def forget(self, connection: socket.socket) -> None:
        """Stop waiting for that connection. Local; any thread may call it."""
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(connection)

    # ---- sleeping --------------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something to read, another thread interrupts, or the time is up."""
        with self._closing:
            if self._is_closed:
                return
            self._sleepers.add(threading.get_ident())
        try:
            if any(descriptor == self._interrupts for descriptor, _ in self._poll.poll(timeout_s)):
                self._take_interrupt()
        finally:
            with self._closing:
                self._sleepers.discard(threading.get_ident())
                self._release()

    def _release(self) -> None:
        """After closing, release the descriptors on which threads sleep once none does."""
        if self._is_closed and not self._sleepers:
            self._descriptors.close()

    def _take_interrupt(self) -> None:
        if not self._is_closed:  # otherwise all threads have to wake
            with contextlib.suppress(BlockingIOError):  # Another thread was faster.
                os.eventfd_read(self._interrupts)

    @property
    def has_sleepers(self) -> bool:
        """Whether a thread is in `wait`."""
        return bool(self._sleepers)

    def interrupt(self) -> None:
        """End the sleep of another thread, or the next one. Local."""
        with self._closing:
            if not self._is_closed:
                os.eventfd_write(self._interrupts, 1)

    def close(self, patience_s: float = 2.0) -> None:
        """Leave the group.

        Args:
            patience_s: seconds until peers are given up that do not receive what they were sent.
        """
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            os.eventfd_write(self._interrupts, 1)  # The last sleeping thread closes the descriptors.
        self._connections.close(self.group, patience_s)
        with self._closing:
            self._release()

    def disown(self) -> None:
        """In a forked child: release the connections, so that they end with the parent. Local."""
        self._is_closed = True
        self._connections.disown()
