"""Is that process still there? By pidfd, which also sees a process that nobody has reaped yet."""

from __future__ import annotations

import os
import select
import socket
from dataclasses import dataclass

__all__ = ["PeerIdentity", "Watch", "own_identity"]


def _start_time(pid: int) -> int:
    """Start time of a process in clock ticks since boot; tells it from a later one with its pid."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name, in parentheses, may hold anything; the fields behind it are plain.
        return int(file.read().rpartition(b")")[2].split()[19])


@dataclass(frozen=True)
class PeerIdentity:
    """One process of one host.

    Attributes:
        pid: its process id.
        start_time: clock ticks after boot.
        host: the name of its host.
    """

    pid: int
    start_time: int
    host: str


def own_identity() -> PeerIdentity:
    """The identity of the calling process."""
    return PeerIdentity(os.getpid(), _start_time(os.getpid()), socket.gethostname())


class Watch:
    """Watches a set of processes for their end.

    A process in another pid namespace cannot be watched; it then counts as alive for ever, and
    the deadline of a wait is what ends it.
    """

    def __init__(self, peers: dict[int, PeerIdentity]) -> None:
        """Args: peers: rank -> identity, without the calling process."""
        self._ranks: dict[int, int] = {}
        self._poll = select.poll()
        self._dead: set[int] = set()
        for rank, peer in peers.items():
            self.add(rank, peer)

    def add(self, rank: int, peer: PeerIdentity) -> None:
        """Watch one more process."""
        try:
            fd = os.pidfd_open(peer.pid)
        except ProcessLookupError:
            self._dead.add(rank)
            return
        except OSError:
            return
        try:
            if _start_time(peer.pid) != peer.start_time:
                # That pid means another process here: another pid namespace, or long gone.
                os.close(fd)
                return
        except OSError:
            self._dead.add(rank)
            os.close(fd)
            return
        self._ranks[fd] = rank
        self._poll.register(fd, select.POLLIN)

    def dead(self) -> set[int]:
        """Ranks whose process has ended. Half a microsecond while all are alive."""
        for fd, _ in self._poll.poll(0):
            self._dead.add(self._ranks.pop(fd))
            self._poll.unregister(fd)
            os.close(fd)
        return self._dead

    def close(self) -> None:
        """Stop watching."""
        for fd in self._ranks:
            os.close(fd)
        self._ranks.clear()
        self._poll = select.poll()
