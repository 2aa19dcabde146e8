"""Finds threads of this process that may run the user's code.

[Note: what calls back] A thread of Python's standard library has no frame of the user's while it waits, but may call a
user's function later: a timer, a scheduler, an event loop with tasks, a server, a pool worker and the thread that
delivers a pool's results. An idle one calls nothing before another thread gives it work.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from lockstep.frames import is_library_file, library_folders

__all__ = ["MAIN_THREAD", "threads_of_user"]

MAIN_THREAD = threading.main_thread().ident


def threads_of_user() -> set[int]:
    """Threads that run user code, have called it, or may call it: see [Note: what calls back].

    User code is code outside of installed libraries. Excludes the main thread and the caller's.
    """
    known = (MAIN_THREAD, threading.get_ident())
    frames = {thread: frame for thread, frame in sys._current_frames().items() if thread not in known}
    return {thread for thread, frame in frames.items() if any(map(_is_users, _walk(frame)))}


def _walk(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    return _is_users_file(frame.f_code.co_filename) or _calls_back(frame)


@functools.lru_cache(maxsize=1024)
def _is_users_file(name: str) -> bool:
    return not is_library_file(name, _folders())


_folders = functools.cache(library_folders)


def _always(_: Any) -> bool:
    return True


def _loop_has_more(loop: Any) -> bool:
    asyncio = sys.modules["asyncio"]
    # If the private attribute is missing, only tasks count.
    return bool(asyncio.all_tasks(loop) or getattr(loop, "_scheduled", ()))


# Class whose method `run` (or as below) is on the stack -> whether that object may yet call user code. By name, because
# most programs import none of these modules.
_CALLERS_BACK: Mapping[tuple[str, str], Callable[[Any], bool]] = {
    ("threading", "Timer"): _always,
    ("sched", "scheduler"): _always,
    ("socketserver", "BaseServer"): _always,
    ("asyncio.base_events", "BaseEventLoop"): _loop_has_more,
    ("concurrent.futures.thread", "_WorkItem"): _always,
    ("concurrent.futures.process", "_ExecutorManagerThread"): lambda manager: bool(manager.pending_work_items),
}
_METHODS = frozenset({"run", "run_forever", "serve_forever"})
_POOLS_RESULTS = "multiprocessing.pool", "_handle_results"


def _calls_back(frame: FrameType) -> bool:
    module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
    if (module, function) == _POOLS_RESULTS:
        return bool(frame.f_locals.get("cache"))  # of pending results
    if function not in _METHODS:
        return False
    caller = frame.f_locals.get("self")
    for one in type(caller).__mro__:
        if one.__module__ == module and (may_call := _CALLERS_BACK.get((one.__module__, one.__qualname__))) is not None:
            return may_call(caller)
    return False
