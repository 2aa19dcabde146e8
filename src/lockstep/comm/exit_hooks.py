"""Tells the peers how this process ends, so that they need not find out by waiting.

Installed once, when the first group is made: an exit handler that leaves every group still open,
an exception hook that first writes the exception into the flight record, and a fork handler by
which a child (a worker of a DataLoader, say) gives up the groups that it inherited, because its end
is not the end of the rank.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from types import TracebackType
from typing import Protocol

from lockstep.comm.callsite import describe_exception

__all__ = ["register"]


class _Group(Protocol):
    def fail(self, message: str, error: BaseException | None = None) -> None: ...

    def shutdown(self) -> None: ...

    def disown(self) -> None: ...


_groups: weakref.WeakSet[_Group] = weakref.WeakSet()
_installed = False


def register(group: _Group) -> None:
    """Tell `group` when this process ends. Local."""
    global _installed
    _groups.add(group)
    if not _installed:
        _installed = True
        atexit.register(_leave_all)
        os.register_at_fork(after_in_child=_disown_all)
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            _fail_all(error)
            previous(kind, error, trace)

        sys.excepthook = hook


def _fail_all(error: BaseException) -> None:
    """Write `error` into the flight record of every open group."""
    message = describe_exception(error)
    for group in list(_groups):
        group.fail(message, error)


def _leave_all() -> None:
    for group in list(_groups):
        group.shutdown()


def _disown_all() -> None:
    for group in list(_groups):
        group.disown()
    _groups.clear()
