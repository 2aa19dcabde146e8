"""Tells whether a process is still running, by pidfd, which also detects the end of a process not reaped yet.

All watches of this process share the pidfds, and a thread that sleeps on them (`sentry.py`). If pidfds are unavailable
(old kernel, a container whose filter does not know the call, no descriptors left), each wait reads `/proc/<pid>/stat`
instead, which costs more and is done less often.

[Note: what proves a death] A pid identifies a process only within its pid namespace, so a process in another one
(another container) is not watched by its pid. A wait for such a process ends by its state word in the shared segment,
which it sets when it leaves or fails, or at the deadline. Within the namespace, only the following prove a death: the
kernel's "no such process" (ESRCH, ENOENT), a readable pidfd, and a zombie. Any other error (no descriptors left, no
permission) is about the process that asks.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.shm.sentry import ProcessKey, sentry

__all__ = [
    "PeerIdentity",
    "Watch",
    "is_running",
    "own_identity",
    "pid_namespace",
    "seconds_since_boot",
    "started_at_s",
]

_READ_PROC_EVERY_S = 0.05
_NO_SUCH_PROCESS = (errno.ENOENT, errno.ESRCH)


def _read_stat(pid: int) -> tuple[str, int]:
    """State letter and start time (clock ticks after boot) of a process. OSError if it cannot be read."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name, in parentheses, may contain anything; the fields after it are plain.
        fields = file.read().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])


def seconds_since_boot() -> float:
    """The current time, on a clock that all processes of a host share and nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def started_at_s() -> float:
    """The start time of this process, in seconds since boot, accurate to a hundredth."""
    return _read_stat(os.getpid())[1] / os.sysconf("SC_CLK_TCK")


def pid_namespace() -> int:
    """Identifies the pid namespace: processes in different ones, such as containers, cannot see each other's pids."""
    return os.stat("/proc/self/ns/pid").st_ino


@dataclass(frozen=True)
class PeerIdentity:
    """Identifies one process on one host.

    Attributes:
        pid: its process id.
        start_time: clock ticks after boot.
        host: the name of its host.
        pid_namespace: inode of the namespace in which `pid` is valid.
    """

    pid: int
    start_time: int
    host: str
    pid_namespace: int


def own_identity() -> PeerIdentity:
    """The identity of the calling process. Read once: it stays known when descriptors run out later."""
    return _identity_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _identity_of(pid: int) -> PeerIdentity:
    return PeerIdentity(pid, _read_stat(pid)[1], socket.gethostname(), pid_namespace())


def is_running(peer: PeerIdentity) -> bool:
    """Whether a process on this host is still running, and not a zombie. See [Note: what proves a death].

    A process in another pid namespace counts as running, since this cannot be determined.
    """
    if peer.pid_namespace != pid_namespace():
        return True
    try:
        state, start_time = _read_stat(peer.pid)
    except OSError as error:
        return error.errno not in _NO_SUCH_PROCESS and _has_pid(peer.pid)
    return start_time == peer.start_time and state not in "ZX"


def _has_pid(pid: int) -> bool:
    """Whether any process, even a zombie, has that pid. Needs no descriptor."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process
    return True


class Watch:
    """Watches a set of processes on this host for their end. Thread-safe.

    A process in another pid namespace cannot be watched and always counts as alive. See [Note: what proves a death].

    Args:
        peers: rank -> identity, without the calling process.
        on_death: called in any thread after a process has ended, unless `must_ask`; must not block.
    """

    def __init__(self, peers: Mapping[int, PeerIdentity], on_death: Callable[[], None] | None = None) -> None:
        self._ranks: dict[ProcessKey, set[int]] = {}
        self._without_pidfd: dict[int, PeerIdentity] = {}
        self._read_proc_at_s = 0.0
        self._dead: set[int] = set()
        self._on_death = on_death
        for rank, peer in peers.items():
            self.add(rank, peer)

    @property
    def must_ask(self) -> bool:
        """Whether some process's end is only detected by `dead`, and not reported to `on_death`."""
        return bool(self._without_pidfd)

    def add(self, rank: int, peer: PeerIdentity) -> None:
        """Watch one more process. Local."""
        if peer.pid_namespace != pid_namespace():
            return
        process = (peer.pid, peer.start_time)
        self._ranks.setdefault(process, set()).add(rank)
        if sentry().join(process, self):
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
                self._without_pidfd[rank] = peer  # polled by `dead`
        if is_peer and fd is not None and sentry().watch(process, fd, self):
            return
        if fd is not None:
            os.close(fd)
        if is_peer:
            self._without_pidfd[rank] = peer
        # Otherwise it is dead, or this `/proc` counts time or pids differently, and it cannot be watched.

    def note_end(self, process: ProcessKey) -> None:
        """Note the end of a process watched by the sentry."""
        self._dead.update(self._ranks[process])
        on_death = self._on_death
        if on_death is not None:
            on_death()

    def dead(self) -> set[int]:
        """Ranks whose process has ended. Takes a microsecond while all are alive."""
        sentry().look()
        if self._without_pidfd and time.monotonic() >= self._read_proc_at_s:
            self._read_proc_at_s = time.monotonic() + _READ_PROC_EVERY_S
            asked = list(self._without_pidfd.items())
            self._dead.update(rank for rank, peer in asked if not is_running(peer))
        return set(self._dead)

    def close(self) -> None:
        """Stop watching."""
        sentry().leave(self)
        self._on_death = None
        self._without_pidfd.clear()
