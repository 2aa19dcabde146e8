"""A deadline for callbacks of asynchronous calls.

Callbacks run in the thread that runs the calls of the group. One that waits for a call queued behind its own would wait
for its own thread. The handle of that call knows this and runs it (`Runner.run_until` in `work.py`); the wait of a
future is torch's C++, which does not. Nothing but this deadline ends it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["CallbackWatch"]


class CallbackWatch:
    """Looks out for a callback that holds up queued calls for too long.

    Args:
        limit_s: tells how many seconds are too long.
        has_queued: tells whether calls are queued that the callback's thread is to run.
        give_up: called with the seconds, in a thread of its own, when a callback has taken too long.
    """

    def __init__(
        self, limit_s: Callable[[], float], has_queued: Callable[[], bool], give_up: Callable[[float], None]
    ) -> None:
        self._limit_s = limit_s
        self._has_queued = has_queued
        self._give_up = give_up
        self._since_s: float | None = None  # when the callback began that runs now
        self._timer: threading.Timer | None = None  # from the first callback with a call behind it on
        self._lock = threading.Lock()
        self._is_closed = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Callbacks run, until the block is left."""
        self._since_s = time.monotonic()
        self.look_out()
        try:
            yield
        finally:
            self._since_s = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The callback runs calls, which have deadlines of their own, until the block is left."""
        is_running, self._since_s = self._since_s is not None, None
        try:
            yield
        finally:
            if is_running:
                self._since_s = time.monotonic()
                self.look_out()

    def look_out(self) -> None:
        """Begin to look, if a callback runs and calls are queued behind it. Local."""
        if self._since_s is None or not self._has_queued():
            return
        with self._lock:
            if self._timer is None and not self._is_closed:
                self._look_in(self._limit_s())

    def _look_in(self, seconds: float) -> None:
        self._timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        limit_s = self._limit_s()
        with self._lock:
            self._timer = None
            since_s = self._since_s
            if since_s is None or self._is_closed or not self._has_queued():
                return
            left_s = since_s + limit_s - time.monotonic()
            if left_s > 0:
                self._look_in(left_s)
                return
        self._give_up(limit_s)

    def close(self) -> None:
        """Look no more. Local."""
        with self._lock:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
