"""Waits until gloo's threads are at rest, before the interpreter exits and before groups are destroyed.

[Note: gloo at exit] The rank that calls a collective continues when gloo has the result; after that, a thread of gloo
drops its references to the tensors, and needs the GIL for it. If the script ends at that moment with the group still
referenced (a DDP model holds it, also after `destroy_process_group`), the interpreter ends first, and Python ends a
thread that asks a dead interpreter for the GIL in a way that C++ answers with `terminate called without an active
exception`: SIGABRT after a training that went well, in one run of ten with torch 2.13's own DDP. An exit handler runs
while the GIL can still be had, so it gives it away until these threads have nothing left to do.

[Note: gloo at its end] A group over gloo that goes joins these threads: with torch < 2.8 always with the GIL held, and
with any torch so far if the last to refer to it is the reducer of a DDP model, which is freed after
`destroy_process_group()` when the script's `main()` returns. If one of the threads still wants the GIL for a tensor,
both wait for ever. So they are to rest before the groups are destroyed, which comes before either.

[Note: at rest] A thread that waits for the GIL sleeps like one that has nothing to do. But it wakes up every 5 ms to
look, and as soon as the GIL is given away; where the cores are busy it may then not run at once, and does not sleep
either. So this thread sleeps longer than those 5 ms. Another thread is at rest if it slept before and after, and has
not run in between. Such an old torch gives the threads no name: any thread counts that Python has not started, but for
those that poll, as gloo's loop over its sockets does a hundred times a second. That one holds no tensors.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lockstep.comm.torch_version import joins_gloo_with_gil
from lockstep.torch_private.patching import wrap_once

__all__ = ["register"]

_THREAD_NAME = "pt_gloo"  # torch names them pt_gloo_runloop
_NAP_S = 0.007  # longer than what sys.getswitchinterval() says by default
_DEADLINE_S = 5.0

_installed = False


def register() -> None:
    """Have this process wait for gloo's threads, some milliseconds, at the two ends. Local; may be called again.

    See [Note: gloo at exit] and [Note: gloo at its end]. Elsewhere than on Linux there is nothing to wait for.
    """
    global _installed
    if not _installed:
        _installed = True
        atexit.register(_await_rest)
    wrap_once("torch.distributed.distributed_c10d.destroy_process_group", _resting_before, alias="torch.distributed")


def _resting_before(destroy: Callable[..., Any]) -> Callable[..., Any]:
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        _await_rest()
        return destroy(*args, **kwargs)

    return destroy_process_group


def _has_names() -> bool:
    """Whether gloo's threads can be told by their names, which came with the release that releases the GIL."""
    torch = sys.modules.get("torch")  # not imported for this: the launcher does without
    return torch is None or not joins_gloo_with_gil(torch.__version__)


def _await_rest() -> None:
    """See [Note: at rest]."""
    deadline = time.monotonic() + _DEADLINE_S
    others: set[str] = set()
    before: dict[str, str] | None = {}
    now = _asleep(others)
    while (now is None or now != before) and time.monotonic() < deadline:
        time.sleep(max(_NAP_S, 1.4 * sys.getswitchinterval()))
        before, now = now, _asleep(others)


def _asleep(others: set[str]) -> dict[str, str] | None:
    """Of each thread of gloo how often it has gone to sleep so far; None if one of them is not asleep.

    Args:
        others: numbers of threads that are none of these; what polls is added.
    """
    found: dict[str, str] = {}
    has_names = _has_names()
    others.update(str(thread.native_id) for thread in threading.enumerate())
    others.update((str(os.getpid()), str(threading.get_native_id())))  # Python < 3.12 has those of before a fork
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            fields = _status(thread)
            is_gloo = fields.get("Name", "").startswith(_THREAD_NAME)
            if not is_gloo and (has_names or thread in others or _polls(thread, others)):
                continue
            if not fields.get("State", "").startswith("S"):
                return None
            found[thread] = fields.get("voluntary_ctxt_switches", "")
    return found


def _polls(thread: str, others: set[str]) -> bool:
    """Whether a thread waits for sockets; it is added to `others`, since it may be about to run at the next look."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/wchan") as file:
        if "poll" in file.read():
            others.add(thread)
    return thread in others


def _status(thread: str) -> dict[str, str]:
    """What the kernel says of a thread of this process; nothing if it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/status", errors="replace") as file:
        pairs = (line.partition(":") for line in file)
        return {name: value.strip() for name, _, value in pairs}
    return {}
