"""The links of a group over several hosts: a connection to each other rank, for short messages.

The connections tell of the end of a process as well (`connections.py`). `peer_listener.py` makes them for the first
group; groups that are made of its ranks share them.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lockstep.comm.hosts.connections import Connections

__all__ = ["Links"]


class Links:
    """The links of one rank in one group. Not thread-safe, apart from `wait` and `interrupt`.

    Args:
        sockets: the connected socket of each other rank.

    Attributes:
        lost: ranks that are gone from the group, and all of whose messages `poll` has yielded.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._join(Connections(sockets), 0, {peer: peer for peer in sockets})

    def share(self, name: str, ranks: Sequence[int]) -> Links:
        """The links of a further group, over the same connections. Called by all ranks of that group.

        Args:
            name: of the group, the same on all its ranks. Of several groups with one name all ranks make the same
                number, in the same order.
            ranks: for each rank of that group its rank in this one.
        """
        links = Links.__new__(Links)
        new_ranks = {self._peers[rank]: new for new, rank in enumerate(ranks) if rank in self._peers}
        links._join(self._connections, self._connections.number_of(name), new_ranks)
        return links

    def _join(self, connections: Connections, group: int, ranks: Mapping[int, int]) -> None:
        self.lost: set[int] = set()
        self._connections = connections
        self._group = group
        self._ranks = dict(ranks)  # in this group, of those at the other ends of the connections
        self._peers = {rank: peer for peer, rank in ranks.items()}  # and back
        self._inbox: deque[tuple[int, memoryview | None]] = deque()
        self._interrupts = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._interrupts, select.EPOLLIN)
        self._sleepers: set[int] = set()  # threads in `wait`
        self._is_closed = False
        for one in connections.open(self._group, self, self._ranks):
            self._poll.register(one, select.EPOLLIN)

    def send(self, peer: int, message: bytes) -> None:
        """Send a message, or as much of it as the connection takes; `poll` sends the rest."""
        if not self._is_closed:
            self._connections.send(self._group, self._peers[peer], message)

    def poll(self) -> Iterator[tuple[int, memoryview]]:
        """The messages that have come, as (rank, bytes)."""
        if not self._is_closed:
            self._connections.receive(self)
        while self._inbox:
            rank, message = self._inbox.popleft()
            if message is None:
                self.lost.add(rank)
            else:
                yield rank, message

    def put_back(self, messages: Iterable[tuple[int, memoryview]]) -> None:
        """Have the next `poll` yield these messages first, and the next `wait` not sleep. Local."""
        self._inbox.extendleft(reversed(list(messages)))
        if self._inbox:
            self.interrupt()

    def sources(self) -> dict[int, str]:
        """From which address each rank is connected, as this host sees it. Local."""
        return {rank: self._connections.source(peer) for rank, peer in self._peers.items()}

    # ---- for the connections: an `Inbox` ---------------------------------------------------------------

    def deliver(self, peer: int, message: memoryview | None) -> None:
        """Keep a message for `poll`; None: that rank is gone. Local; by any thread."""
        self._inbox.append((self._ranks[peer], message))

    def forget(self, connection: socket.socket) -> None:
        """Sleep no more until that connection has something to read. Local; by any thread."""
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(connection)

    # ---- sleeping --------------------------------------------------------------------------------------

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
        if not self._is_closed:
            with contextlib.suppress(OSError, ValueError):
                os.eventfd_write(self._interrupts, 1)

    def close(self) -> None:
        """Leave the group: send the rest, within two seconds."""
        if self._is_closed:
            return
        self._is_closed = True
        self._connections.close(self._group)
        self._poll.close()
        os.close(self._interrupts)
