"""Tells the peers how this process ends, so that they need not find out by waiting.

Installed when the first group is made, once: an exit handler that leaves every group still open,
and an exception hook that first writes what was raised into the flight record.
"""

from __future__ import annotations

import atexit
import sys
import traceback
import weakref
from types import TracebackType
from typing import Protocol

from lockstep.comm.flight import INTERNAL_FOLDERS

__all__ = ["describe_exception", "register"]


class _Group(Protocol):
    def fail(self, message: str, error: BaseException | None = None) -> None: ...

    def shutdown(self) -> None: ...


_groups: weakref.WeakSet[_Group] = weakref.WeakSet()
_installed = False


def register(group: _Group) -> None:
    """Have `group` told when this process ends. Local."""
    global _installed
    _groups.add(group)
    if not _installed:
        _installed = True
        atexit.register(_leave_all)
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            fail_all(error)
            previous(kind, error, trace)

        sys.excepthook = hook


def fail_all(error: BaseException) -> None:
    """Write `error` into the flight record of every open group. Local."""
    message = describe_exception(error)
    for group in list(_groups):
        group.fail(message, error)


def _leave_all() -> None:
    for group in list(_groups):
        group.shutdown()


def describe_exception(error: BaseException) -> str:
    """`ValueError: text at train.py:81 in main`, with the innermost line of the user's own code."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(INTERNAL_FOLDERS)]
    for frame in reversed(own or list(frames)):
        return f"raised {text} at {frame.filename}:{frame.lineno} in {frame.name}"
    return f"raised {text}"
