"""The sentry: one thread of this process that sleeps until a process with which it shares memory ends.

[Note: one sentry] Each group has a `Watch`, and they mostly watch the same processes. So there is one pidfd for each
process, whatever the number of groups, and one thread that sleeps on all of them: it costs nothing while no process
dies. When one dies, it notifies its listeners, the watches of that process, which wake the waiting ranks. The thread
exists while any process is watched. A forked child has no such thread, and must not use the descriptors: it shares its
epoll with the parent.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol

__all__ = ["DeathListener", "ProcessKey", "Sentry", "sentry"]

# Pid and start time: a pid alone may be reused.
ProcessKey = tuple[int, int]
_END_PATIENCE_S = 1.0


class DeathListener(Protocol):
    """An object that is notified of the end of processes."""

    def note_end(self, process: ProcessKey) -> None:
        """Note that the process has ended. Called in any thread, at most once for each process; must not block."""


class _WatchedProcess:
    """A watched process."""

    __slots__ = ("fd", "listeners", "process")

    def __init__(self, process: ProcessKey, fd: int) -> None:
        self.process = process
        self.fd = fd
        self.listeners: weakref.WeakSet[DeathListener] = weakref.WeakSet()  # a group may be dropped without closing it


class Sentry:
    """Watches processes for their end, for all groups of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[ProcessKey, _WatchedProcess] = {}
        self._by_fd: dict[int, _WatchedProcess] = {}
        # Set while there are watched processes, and until the thread has seen that there are none.
        self._epoll: select.epoll | None = None
        self._bell = -1
        self._reserve = -1  # a descriptor kept for when no other is left; see `lend`
        self._thread: threading.Thread | None = None

    def join(self, process: ProcessKey, listener: DeathListener) -> bool:
        """Listen for the end of a process that is already watched; False if it is not. Local."""
        with self._lock:
            watched = self._watched.get(process)
            if watched is not None:
                watched.listeners.add(listener)
            return watched is not None

    def watch(self, process: ProcessKey, pidfd: int, listener: DeathListener) -> bool:
        """Listen for the end of a process. Local.

        Args:
            process: pid and start time of the process.
            pidfd: its pidfd, owned by the sentry from now on if the result is True.
            listener: notified when the process ends.

        Returns:
            Whether the sentry can watch it; False if there are no descriptors or threads left.
        """
        with self._lock:
            watched = self._watched.get(process)
            if watched is not None:
                os.close(pidfd)  # another thread was faster
            elif not self._start():
                return False
            else:
                assert self._epoll is not None
                self._epoll.register(pidfd, select.EPOLLIN)
                watched = self._watched[process] = self._by_fd[pidfd] = _WatchedProcess(process, pidfd)
            watched.listeners.add(listener)
            return True

    def leave(self, listener: DeathListener) -> None:
        """Stop notifying this listener. Local; if nothing is left to watch, the thread ends."""
        with self._lock:
            for watched in list(self._watched.values()):
                watched.listeners.discard(listener)
                if not watched.listeners:
                    self._forget(watched)
            thread = None if self._watched else self._thread
            if thread is not None:
                os.eventfd_write(self._bell, 1)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_PATIENCE_S)

    def look(self) -> None:
        """Notify the listeners of processes that have ended. Local; takes a microsecond while none has."""
        ended: list[_WatchedProcess] = []
        with self._lock:
            if self._epoll is None:
                return
            # Polled under the lock: a descriptor in an older answer may have been reused since.
            for fd, _ in self._epoll.poll(0):
                if fd != self._bell:
                    ended.append(self._by_fd[fd])
                    self._forget(self._by_fd[fd])
        for watched in ended:
            for listener in list(watched.listeners):
                listener.note_end(watched.process)

    @contextlib.contextmanager
    def lend(self) -> Iterator[None]:
        """Allow one descriptor to be opened meanwhile, even if this process has no other left. Local."""
        with self._lock:
            self._give_up_reserve()
        try:
            yield
        finally:
            with self._lock:
                if self._epoll is not None and self._reserve < 0:
                    self._keep_reserve()

    def _keep_reserve(self) -> None:
        with contextlib.suppress(OSError):
            self._reserve = os.dup(self._bell)

    def _give_up_reserve(self) -> None:
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1

    def _forget(self, watched: _WatchedProcess) -> None:
        """Stop watching a process. Under the lock."""
        assert self._epoll is not None
        del self._watched[watched.process], self._by_fd[watched.fd]
        with contextlib.suppress(OSError):  # the script may have closed it, like os.closerange does
            self._epoll.unregister(watched.fd)
            os.close(watched.fd)

    def _start(self) -> bool:
        """Start the thread, and create the descriptors on which it sleeps. Under the lock."""
        if self._epoll is not None:
            return True
        epoll, bell = None, -1
        try:
            epoll = select.epoll()
            bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            epoll.register(bell, select.EPOLLIN)
            thread = threading.Thread(target=self._run, args=[epoll], name="lockstep-sentry", daemon=True)
            self._epoll, self._bell, self._thread = epoll, bell, thread
            thread.start()
            self._keep_reserve()
        except (AttributeError, OSError, RuntimeError):  # no such calls, or no descriptors or threads left
            self._epoll, self._bell, self._thread = None, -1, None
            if epoll is not None:
                epoll.close()
            if bell >= 0:
                os.close(bell)
            return False
        return True

    def _run(self, epoll: select.epoll) -> None:
        """The thread: sleeps until processes end, and notifies the listeners."""
        while True:
            epoll.poll()
            self.look()
            with self._lock:
                if not self._watched:
                    epoll.close()
                    os.close(self._bell)
                    self._give_up_reserve()
                    self._epoll, self._bell, self._thread = None, -1, None
                    return
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)

    def disown(self) -> None:
        """In a forked child: release what belongs to the parent. Takes no lock: it may have been held at the fork."""
        for fd in [*self._by_fd, self._bell, self._reserve]:
            with contextlib.suppress(OSError):
                os.close(fd)
        if self._epoll is not None:
            self._epoll.close()


_sentry = Sentry()


def sentry() -> Sentry:
    """The sentry of this process. Local."""
    return _sentry


def _begin_anew() -> None:
    global _sentry
    _sentry.disown()
    _sentry = Sentry()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
