"""Waits for MPI without blocking calls: polls, yields the core, sleeps briefly, and checks peers and deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from lockstep.shm.cores import LONG_YIELD_S, nap

__all__ = ["MpiWaiter"]

_LOOK_EVERY_S = 0.002
_NAP_AFTER_S = 0.002


class MpiWaiter:
    """Waits for peers of one group on one rank.

    Args:
        num_local: number of ranks of the group on this host, this one included.

    Attributes:
        spins: how often to poll before the core is yielded.
        closed: whether this rank has left the group, so that every wait ends.
    """

    def __init__(self, num_local: int) -> None:
        # A poll costs about a microsecond. If ranks share a core, the awaited rank needs it.
        self.spins = 100 if num_local <= len(os.sched_getaffinity(0)) else 4
        self.closed = False

    def close(self) -> None:
        """End this rank's waits, current and future. Local; any thread may call it."""
        self.closed = True

    def wait(self, awaited: Callable[[], list[int]], look: Callable[[list[int], float], None]) -> None:
        """Wait until no rank is awaited.

        Args:
            awaited: polls MPI, and returns the ranks that are still awaited.
            look: called with these and the seconds waited, every few milliseconds; raises to end the wait.
        """
        for _ in range(self.spins):
            if not awaited():
                return
        start = time.monotonic()
        next_look_s = 0.0
        while True:
            ranks = awaited()
            if not ranks:
                return
            waited_s = time.monotonic() - start
            if waited_s >= next_look_s:
                look(ranks, waited_s)
                next_look_s = waited_s + _LOOK_EVERY_S
            if waited_s > _NAP_AFTER_S:
                nap(waited_s / 20)
                continue
            before = time.monotonic()
            os.sched_yield()
            if time.monotonic() - before > LONG_YIELD_S:
                nap(0)
