"""The heartbeat of a launcher: it increments a number in the store, and counts as lost if that stops for too long.

Clocks of different hosts are never compared: an observer measures with its own clock how long a number has not changed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.launch.hosts.job_store import JobStore, StoreLost

__all__ = ["Heartbeat", "Observer"]

# How many times longer a number may be missing than unchanged.
_UNSEEN_TIMES = 10


def _key(host: str) -> str:
    return f"heartbeat/{host}"


class Heartbeat:
    """Counts for this launcher, in a separate thread and connection, so that it beats while the launcher waits.

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
        """Stop counting."""
        self._stopped.set()
        self._thread.join(timeout=1.0)

    def _beat(self) -> None:
        self._count += 1
        self._store.set(self._key, str(self._count))

    def _run(self) -> None:
        with contextlib.suppress(StoreLost):  # the launcher's main thread notices as well, and reports it
            while not self._stopped.wait(self._interval_s):
                self._beat()


class Observer:
    """Detects launchers that have stopped counting.

    A number that is missing, or was overwritten by a foreign process, proves neither life nor death. So the clock of a
    launcher stops meanwhile: a process that overwrites numbers faster than launchers count cannot make a living host
    count as lost. A launcher that is never seen to count is lost in the end.

    Args:
        store: the store in which they count.
        lost_after_s: seconds that a number may stay unchanged.
    """

    def __init__(self, store: JobStore, lost_after_s: float) -> None:
        self._store = store
        self._lost_after_s = lost_after_s
        self._seen: dict[str, _Seen] = {}

    def lost(self, hosts: Iterable[str]) -> list[str]:
        """The launchers among these whose number has not changed for too long."""
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
    """The last observation of a launcher: its count, when it appeared and was last read, how long it was unchanged."""

    count: str | None
    changed_s: float
    looked_s: float
    still_s: float = 0.0
