"""Short messages between the ranks of one group over several hosts.

`Links` is the view that one group has of the connections (`connections.py`), which all groups of the process share.
They also report that a process has ended. `peer_listener.py` makes them, for the first group.
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
    """The links of one rank in one group. Not thread-safe, apart from `wait` and `interrupt`.

    Args:
        sockets: the connected socket of each other rank.

    Attributes:
        group: the number of the group among those over the same connections; the same on all ranks.
        lost: ranks that are gone from the group, and all of whose messages `poll` has yielded.
        messages: what has come, for `poll`; the connections put it there.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._join(Connections(sockets), 0, {peer: peer for peer in sockets})

    def share(self, name: str, ranks: Sequence[int]) -> Links:
        """The links of a further group, over the same connections. Called by all ranks of that group.

        Args:
            name: of the group, the same on all its ranks. Of several groups with one name all ranks make the same
                number, in the same order.
            ranks: for each rank of that group its rank in this one.

        Raises:
            NotInitialized: the last group over these connections was closed.
            OSError: this process has no descriptor left; the others see that it has left that group.
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
        self._ranks = dict(ranks)  # in this group, of those at the other ends of the connections
        self._peers = {rank: peer for peer, rank in ranks.items()}  # and back
        self.messages: deque[Message] = deque()
        self._sleepers: set[int] = set()  # threads in `wait`
        self._is_closed = False
        self._closing = threading.RLock()  # the handler of a signal may come here, too
        with contextlib.ExitStack() as stack:
            self._interrupts = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            stack.callback(os.close, self._interrupts)
            self._poll = stack.enter_context(select.epoll())
            self._poll.register(self._interrupts, select.EPOLLIN)
            connections.open(self.group, self, self._ranks)
            self._descriptors = stack.pop_all()

    def send(self, peer: int, message: bytes | memoryview) -> None:
        """Send a message, or as much of it as the connection takes now, and the rest later. Local."""
        if not self._is_closed:
            self._connections.send(self.group, self._peers[peer], message)

    def poll(self) -> Iterator[tuple[int, memoryview]]:
        """The messages that have come, as (rank, bytes)."""
        if not self._is_closed:
            self._connections.receive(self)
        while self.messages:
            peer, message, _ = self.messages.popleft()
            if message is None:
                self.lost.add(self._ranks[peer])
            else:
                yield self._ranks[peer], message

    def put_back(self, messages: Iterable[tuple[int, memoryview]]) -> None:
        """Have the next `poll` yield these messages first, and the next `wait` not sleep. Local."""
        self.messages.extendleft((self._peers[rank], message, self.group) for rank, message in reversed(list(messages)))
        if self.messages:
            self.interrupt()

    def sources(self) -> dict[int, str]:
        """From which address each rank is connected, as this host sees it. Local."""
        return {rank: self._connections.source(peer) for rank, peer in self._peers.items()}

    def lose_silent(self) -> None:
        """Take ranks for gone whose hosts do not answer any more; the next `poll` knows. Local."""
        self._connections.lose_silent()

    # ---- for the connections: an `Inbox` ---------------------------------------------------------------

    def expect(self, connection: socket.socket) -> None:
        """Sleep until that connection has something to read, at most. Local; by any thread."""
        self._poll.register(connection, select.EPOLLIN)

    def forget(self, connection: socket.socket) -> None:
        """Sleep no more until that connection has something to read. Local; by any thread."""
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
        """At the end, close what threads sleep on once none does."""
        if self._is_closed and not self._sleepers:
            self._descriptors.close()

    def _take_interrupt(self) -> None:
        if not self._is_closed:  # Else all threads are to wake.
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
            patience_s: until peers are given up that do not take what they were sent.
        """
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            os.eventfd_write(self._interrupts, 1)  # The last thread that sleeps closes what it sleeps on.
        self._connections.close(self.group, patience_s)
        with self._closing:
            self._release()

    def disown(self) -> None:
        """In a forked child: let go of the connections, so that the end of the parent ends them. Local."""
        self._is_closed = True
        self._connections.disown()
