"""Is that process still there? By pidfd, which also sees a process that nobody has reaped yet.

Where pidfds cannot be had (an old kernel, a container whose filter does not know the call, no descriptor
left), `/proc/<pid>/stat` tells the same, at a higher price and therefore less often.

[Note: what proves a death] A pid means a process only within its pid namespace, so a process of another one (another
container) is not watched by its pid: its state word in the shared segment, which it sets when it leaves or fails, and
the deadline of the wait are what end a wait for it. Within the namespace only a kernel that says "no such process"
(ESRCH, ENOENT), a pidfd that became readable, and a zombie prove a death. Any other error (no descriptor left, no
permission) says something about the process that asks.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from dataclasses import dataclass

__all__ = [
    "PeerIdentity",
    "Watch",
    "is_running",
    "own_identity",
    "pid_namespace",
    "seconds_since_boot",
    "started_at_s",
]

_CLOSE_PATIENCE_S = 0.1
_READ_PROC_EVERY_S = 0.05
_NO_SUCH_PROCESS = (errno.ENOENT, errno.ESRCH)


def _read_stat(pid: int) -> tuple[str, int]:
    """State letter and start time (clock ticks after boot) of a process. OSError if it cannot be read."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name, in parentheses, may hold anything; the fields behind it are plain.
        fields = file.read().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])


def seconds_since_boot() -> float:
    """Now, on a clock that all processes of a host share and nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def started_at_s() -> float:
    """When this process began, in seconds since boot, to a hundredth."""
    return _read_stat(os.getpid())[1] / os.sysconf("SC_CLK_TCK")


def pid_namespace() -> int:
    """Tells processes that can see each other's pids from those that cannot, such as in two containers."""
    return os.stat("/proc/self/ns/pid").st_ino


@dataclass(frozen=True)
class PeerIdentity:
    """One process of one host.

    Attributes:
        pid: its process id.
        start_time: clock ticks after boot.
        host: the name of its host.
        pid_namespace: inode of the namespace in which `pid` means this process.
    """

    pid: int
    start_time: int
    host: str
    pid_namespace: int


def own_identity() -> PeerIdentity:
    """The identity of the calling process."""
    pid = os.getpid()
    return PeerIdentity(pid, _read_stat(pid)[1], socket.gethostname(), pid_namespace())


def is_running(peer: PeerIdentity) -> bool:
    """Whether a process of this host is still there, and is not a zombie. See [Note: what proves a death].

    A process of another pid namespace counts as running: nothing here can tell.
    """
    if peer.pid_namespace != pid_namespace():
        return True
    try:
        state, start_time = _read_stat(peer.pid)
    except OSError as error:
        return error.errno not in _NO_SUCH_PROCESS and _has_pid(peer.pid)
    return start_time == peer.start_time and state not in "ZX"


def _has_pid(pid: int) -> bool:
    """Whether any process, also a zombie, has that pid. Needs no descriptor."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's, but there
    return True


class Watch:
    """Watches a set of processes of this host for their end.

    A process in another pid namespace cannot be watched and counts as alive for ever. See [Note: what proves a death].
    """

    def __init__(self, peers: dict[int, PeerIdentity]) -> None:
        """Args: peers: rank -> identity, without the calling process."""
        self._ranks: dict[int, int] = {}  # pidfd -> rank
        self._poll = select.poll()
        self._without_pidfd: dict[int, PeerIdentity] = {}
        self._read_proc_at_s = 0.0
        self._dead: set[int] = set()
        # Collectives and point to point wait in threads of their own, and a poll object bears only one.
        self._lock = threading.Lock()
        for rank, peer in peers.items():
            self.add(rank, peer)

    def add(self, rank: int, peer: PeerIdentity) -> None:
        """Watch one more process. Local."""
        if peer.pid_namespace != pid_namespace():
            return
        fd: int | None = None
        try:
            fd = os.pidfd_open(peer.pid)
        except ProcessLookupError:
            self._dead.add(rank)
            return
        except (AttributeError, OSError):
            pass
        try:
            # Read after the pidfd was opened: if it is the peer now, it was the peer then.
            is_peer = _read_stat(peer.pid)[1] == peer.start_time
        except OSError as error:
            is_peer = False
            if error.errno in _NO_SUCH_PROCESS:
                self._dead.add(rank)
            else:
                self._without_pidfd[rank] = peer  # `dead` goes on asking
        if not is_peer:
            # Dead, or this `/proc` counts time or pids differently: nothing to watch by.
            if fd is not None:
                os.close(fd)
        elif fd is None:
            self._without_pidfd[rank] = peer
        else:
            self._ranks[fd] = rank
            self._poll.register(fd, select.POLLIN)

    def dead(self) -> set[int]:
        """Ranks whose process has ended. Half a microsecond while all are alive."""
        with self._lock:
            for fd, _ in self._poll.poll(0):
                self._dead.add(self._ranks.pop(fd))
                self._poll.unregister(fd)
                os.close(fd)
            if self._without_pidfd and time.monotonic() >= self._read_proc_at_s:
                self._read_proc_at_s = time.monotonic() + _READ_PROC_EVERY_S
                self._dead.update(rank for rank, peer in self._without_pidfd.items() if not is_running(peer))
            return set(self._dead)

    def close(self) -> None:
        """Stop watching."""
        # A fork may have copied the lock while another thread held it.
        has_lock = self._lock.acquire(timeout=_CLOSE_PATIENCE_S)
        for fd in self._ranks:
            os.close(fd)
        self._ranks.clear()
        self._without_pidfd.clear()
        self._poll = select.poll()
        if has_lock:
            self._lock.release()
