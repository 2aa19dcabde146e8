"""Time limits that adapt to the machine.

A test that waits for something gives up at a limit, and one that must be quick has to end before a limit. Such a number
is written for a quiet machine; `limit_s` converts it to the appropriate one for the current machine and load::

    process.communicate(timeout=limit_s(30))
    assert took_s < limit_s(1.0)

[Note: pace] Limits are extended by two factors. The speed of the machine: a fixed piece of work, measured once per
process; the fastest of several short runs counts, since on a busy machine most are interrupted, but some are not. And
the number of processes per core: the load average of the last minute, or the number of currently runnable processes if
that is larger, so that a process that has just started counts at once. Neither ever shortens a limit.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

__all__ = ["limit_s"]

_NUM_RUNS = 20
_NUM_ADDITIONS = 20_000
# Duration of one run on the reference machine: Python 3.11, a virtual machine on an AMD EPYC of 2024.
_QUIET_RUN_S = 0.6e-3


def limit_s(seconds: float) -> float:
    """Convert a limit in seconds, given for a quiet machine, to one for this machine at this moment.

    Local. Call it when the limit is about to be used, not when a module is imported: the load changes.

    Args:
        seconds: sufficient on an otherwise idle machine.

    Returns:
        Seconds, at least `seconds`.
    """
    return seconds * _slowness() * _crowding()


@functools.cache
def _slowness() -> float:
    """How many times longer than on the reference machine a piece of work takes; at least 1."""
    return max(1.0, min(_run_s() for _ in range(_NUM_RUNS)) / _QUIET_RUN_S)


def _run_s() -> float:
    start_s = time.perf_counter()
    total = 0
    for number in range(_NUM_ADDITIONS):
        total += number * number % 7
    return time.perf_counter() - start_s


def _crowding(loadavg: str | None = None) -> float:
    """Number of processes for each core that this one may use; at least 1.

    Args:
        loadavg: text of /proc/loadavg (proc(5)), such as "0.52 0.58 0.59 3/467 1234"; read if not given.
    """
    text = Path("/proc/loadavg").read_text() if loadavg is None else loadavg
    last_minute, _, _, now, _ = text.split()
    wanting = max(float(last_minute), float(now.partition("/")[0]))
    return max(1.0, wanting / len(os.sched_getaffinity(0)))
