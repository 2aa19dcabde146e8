"""The heartbeat of a launcher: it counts up a number in the store, and is lost if that stands still for too long.

No clock of one host is compared with that of another: an observer measures by its own clock how long a number has not
changed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.launch.hosts.job_store import JobStore, StoreLost

__all__ = ["Heartbeat", "Observer"]

# How much longer than one that stands still a number may be missing.
_UNSEEN_TIMES = 10


def _key(host: str) -> str:
    return f"heartbeat/{host}"


class Heartbeat:
    """Counts for this launcher, in a thread and a connection of its own, so that it beats while the launcher waits.

    Args:
        store: a connection to the store that nothing else uses.
        host: key of this launcher.
        interval_s: seconds between two counts.
    """

    def __init__(self, store: JobStore, host: str, interval_s: float) -> None:
        self._store = store
        self._key = _key(host)
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._count = 0
        self._beat()
        self._thread = threading.Thread(target=self._run, name="lockstep-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Count no more."""
        self._stopped.set()
        self._thread.join(timeout=1.0)

    def _beat(self) -> None:
        self._count += 1
        self._store.set(self._key, str(self._count))

    def _run(self) -> None:
        with contextlib.suppress(StoreLost):  # The launcher's main thread finds out as well, and says so.
            while not self._stopped.wait(self._interval_s):
                self._beat()


class Observer:
    """Notices launchers that have stopped counting.

    A number that is gone, or that a stranger wrote over, proves neither life nor death. So the clock of a launcher
    stands still meanwhile: who writes there faster than the launcher counts has no living host given up. A launcher
    that is never seen to count is lost in the end.

    Args:
        store: the store in which they count.
        lost_after_s: seconds that a number may stand still.
    """

    def __init__(self, store: JobStore, lost_after_s: float) -> None:
        self._store = store
        self._lost_after_s = lost_after_s
        self._seen: dict[str, _Seen] = {}

    def lost(self, hosts: Iterable[str]) -> list[str]:
        """The launchers among these whose number has stood still for too long."""
        now_s = time.monotonic()
        gone = []
        for host in hosts:
            count = self._store.get(_key(host))
            seen = self._seen.get(host)
            if seen is None or (count is not None and count != seen.count):
                self._seen[host] = _Seen(count, now_s, now_s)
                continue
            if count is not None:
                seen.still_s += now_s - seen.looked_s
            seen.looked_s = now_s
            is_unseen_long = now_s - seen.changed_s > _UNSEEN_TIMES * self._lost_after_s
            if seen.still_s > self._lost_after_s or is_unseen_long:
                gone.append(host)
        return gone


@dataclass
class _Seen:
    """What was last seen of a launcher: its count, when it came and was last looked for, and how long it stood."""

    count: str | None
    changed_s: float
    looked_s: float
    still_s: float = 0.0
