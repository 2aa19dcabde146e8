"""Ends ranks that wait for each other, long before the process group's timeout.

A script whose ranks disagree, such as on the number of batches, may leave all of them in collectives that do not match:
each waits for the others, for as long as the timeout says. A thread in each rank looks once a second whether this rank
waits: its main thread is in a function of torch that communicates, and all threads sleep. If all ranks have done
nothing else for a while, none can continue, as only they could wake each other. A rank that has ended counts as one
that waits; one that lacks a processor or a disk does not sleep.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from lockstep.tools.verify.recorder import StepRecorder, is_of_library, line_of
from lockstep.tools.verify.settings import RANKS, VerifySettings

__all__ = ["watch_waits"]

_LOOK_S, _LOOKS = 1.0, 15
# Files of torch whose functions wait for other ranks.
_COMMUNICATE = ("torch/distributed/", "torch/nn/parallel/distributed.py", "torch/autograd/")
_WRAPPER = "wrapper"  # of torch's functions, which logs their calls


def watch_waits(recorder: StepRecorder) -> None:
    """Start the thread, in a rank that has joined a group; see the module."""
    if recorder.settings.role == RANKS:
        threading.Thread(target=_watch, args=(recorder,), daemon=True).start()


def _watch(recorder: StepRecorder) -> None:
    settings, idle = recorder.settings, 0
    own = settings.file("waits", recorder.rank)
    while True:
        time.sleep(_LOOK_S)
        where = _where_it_waits()
        idle = idle + 1 if where else 0
        if idle < _LOOKS:
            own.unlink(missing_ok=True)
            continue
        own.write_text(where)
        texts = [_said_by(settings, each) for each in range(settings.world_size)]
        if all(texts):
            words = ", ".join(f"rank {each} {text}" for each, text in enumerate(texts))
            settings.file("deadlock").write_text(f"all ranks wait for each other: {words}")
            recorder.write()
            time.sleep(_LOOK_S)  # for the others, which look once a second, too
            os._exit(1)


def _said_by(settings: VerifySettings, rank: int) -> str:
    """What another rank waits in; "has ended" if it left its record; empty if it works."""
    try:
        return settings.file("waits", rank).read_text()
    except FileNotFoundError:
        return "has ended" if settings.file("record", RANKS, rank).exists() else ""


def _where_it_waits() -> str:
    """`in broadcast at train.py:18`, if the main thread waits there for other ranks; else empty."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    function = ""
    while frame is not None and is_of_library(frame.f_code.co_filename):
        communicates = any(each in frame.f_code.co_filename for each in _COMMUNICATE)
        function = frame.f_code.co_name if communicates and frame.f_code.co_name != _WRAPPER else function
        frame = frame.f_back
    if frame is None or not function or not _all_sleep():
        return ""
    return f"in {function} at {line_of(frame)}"


def _all_sleep() -> bool:
    """Whether all other threads of this process sleep."""
    own = str(threading.get_native_id())
    return all(_state_of(each) in "SX" for each in Path("/proc/self/task").iterdir() if each.name != own)


def _state_of(task: Path) -> str:
    """The kernel's letter for a thread; X if it has ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
