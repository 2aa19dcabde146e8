"""Lets gloo's threads come to rest before the interpreter ends.

[Note: gloo at exit] The rank that calls a collective goes on when gloo has the result; after that, a thread of gloo
drops its references to the tensors, and needs the GIL for it. If the script ends at that moment with the group still
referenced (a DDP model holds it, also after `destroy_process_group`), the interpreter ends first, and Python ends a
thread that asks a dead interpreter for the GIL in a way that C++ answers with `terminate called without an active
exception`: SIGABRT after a training that went well, in one run of ten with torch 2.13's own DDP. An exit handler runs
while the GIL can still be had, so it gives it away until these threads have nothing left to do.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Iterator

__all__ = ["await_rest_at_exit"]

_THREAD_NAME = b"pt_gloo"  # torch names them pt_gloo_runloop
_ASLEEP = b"S"
_NAP_S = 0.001
_DEADLINE_S = 5.0

_installed = False


def await_rest_at_exit() -> None:
    """Have this process wait for gloo's threads, some milliseconds, before the interpreter ends. Local; once is enough.

    See [Note: gloo at exit]. Elsewhere than on Linux it does nothing.
    """
    global _installed
    if not _installed:
        _installed = True
        atexit.register(_await_rest)


def _await_rest() -> None:
    deadline = time.monotonic() + _DEADLINE_S
    times_at_rest = 0
    # Twice in a row: what waits for the GIL is asleep too, until the nap after the first look gives it away.
    while times_at_rest < 2 and time.monotonic() < deadline:
        time.sleep(_NAP_S)
        times_at_rest = times_at_rest + 1 if all(state == _ASLEEP for state in _thread_states()) else 0


def _thread_states() -> Iterator[bytes]:
    """The scheduler's letter for each of gloo's threads."""
    folder = "/proc/self/task"
    with contextlib.suppress(OSError):
        for thread in os.listdir(folder):
            with contextlib.suppress(OSError), open(f"{folder}/{thread}/stat", "rb") as file:
                # "123 (name) S …"; a name may hold anything, a parenthesis too.
                head, _, rest = file.read().rpartition(b")")
                if head.partition(b"(")[2].startswith(_THREAD_NAME):
                    yield rest.split()[0]
