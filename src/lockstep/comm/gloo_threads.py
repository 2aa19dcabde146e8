"""Waits until gloo's threads are idle, before the interpreter exits and before groups are destroyed.

[Note: gloo at exit] A rank that calls a collective continues as soon as gloo has the result; after that, a thread of
gloo drops its references to the tensors, and needs the GIL to do so. If the script ends at that moment with the group
still referenced (a DDP model holds it, even after `destroy_process_group`), the interpreter shuts down first, and
Python ends a thread that requests the GIL of a dead interpreter in a way that C++ answers with `terminate called
without an active exception`: SIGABRT after a successful training, in one run of ten with torch 2.13's own DDP. An exit
handler runs while the GIL still exists, so it releases the GIL until these threads have nothing left to do.

[Note: gloo at its end] Destroying a gloo group joins these threads: with torch < 2.8 always with the GIL held, and with
any torch so far if the last reference is the reducer of a DDP model, which is freed after `destroy_process_group()`
when the script's `main()` returns. If one of the threads still needs the GIL for a tensor, that is a deadlock. So the
threads must be idle before the groups are destroyed, which comes before either.

[Note: at rest] A thread that waits for the GIL sleeps like one that has nothing to do. But it wakes up every 5 ms to
check, and as soon as the GIL is released; if the cores are busy it may then not run at once, but it is not asleep
either. So this thread sleeps longer than those 5 ms. Another thread is at rest if it was asleep before and after, and
has not run in between. With torch < 2.8 the threads have no names: every thread counts that Python did not start,
except for those that poll, such as gloo's loop over its sockets, a hundred times a second. That one holds no tensors.
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
_NAP_S = 0.007  # longer than the default of sys.getswitchinterval()
_DEADLINE_S = 5.0

_installed = False


def register() -> None:
    """Make this process wait for gloo's threads, some milliseconds, in both places. Local; may be called again.

    See [Note: gloo at exit] and [Note: gloo at its end]. Does nothing on systems other than Linux.
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
    """Whether gloo's threads can be recognised by name: since the torch release in which they release the GIL."""
    torch = sys.modules.get("torch")  # not imported here: the launcher does without it
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
    """How often each of gloo's threads has gone to sleep so far, by thread id; None if one is not asleep.

    Args:
        others: ids of threads that are not gloo's; those that poll are added.
    """
    found: dict[str, str] = {}
    has_names = _has_names()
    others.update(str(thread.native_id) for thread in threading.enumerate())
    others.update((str(os.getpid()), str(threading.get_native_id())))  # Python < 3.12 lists the ids from before a fork
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
    """Whether a thread is polling sockets; then adds it to `others`, since it may be running at the next check."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/wchan") as file:
        if "poll" in file.read():
            others.add(thread)
    return thread in others


def _status(thread: str) -> dict[str, str]:
    """The kernel's status of a thread of this process; empty if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/status", errors="replace") as file:
        pairs = (line.partition(":") for line in file)
        return {name: value.strip() for name, _, value in pairs}
    return {}
