"""Tells the peers how this process ends, so that they need not wait for a timeout.

Installed once, when the first group is created: an exit handler that leaves every group still open, an exception hook
that first writes the exception into the flight record, and a fork handler with which a child (a DataLoader worker, say)
gives up the groups that it inherited, because its end is not the end of the rank.

[Note: exit code] An exception in an exit handler is printed, and the process still exits with code 0. At that point
Python itself can only produce another code, 120, if flushing stderr fails at the very end (`sys.exit`). So an error of
ours at exit makes that flush fail, after all other exit handlers have run.

[Note: children of multiprocessing] A process that multiprocessing started, and that is a rank itself, handles its own
exceptions, and a forked one ends without running atexit handlers. There a multiprocessing finalizer takes their place;
it runs while the exception that ends the process propagates.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing import parent_process, util
from types import TracebackType
from typing import Any, Protocol, TextIO

from lockstep.comm.callsite import describe_exception
from lockstep.comm.user_threads import threads_of_user

__all__ = ["call_at_exit", "register", "shown_by"]


class _Group(Protocol):
    def fail(self, message: str, error: BaseException | None = None) -> None: ...

    def abort(self) -> None: ...

    def disown(self) -> None: ...


_groups: weakref.WeakSet[_Group] = weakref.WeakSet()
_installed = False
_leaves: dict[Callable[[], None], int] = {}  # with the process that registered it
_child_pid = 0  # pid of the process that has the finalizer
shown_by: Callable[[Exception], bool] | None = None
"""Tells the launcher about errors raised in `call_at_exit`; returns whether it shows them, so that we need not."""
_FIRST = 100  # priority of the finalizer: before those that wait for processes or threads


def register(group: _Group) -> None:
    """Notify `group` when this process ends. Local."""
    global _installed, _child_pid
    _groups.add(group)
    if parent_process() is not None and _child_pid != os.getpid():
        _child_pid = os.getpid()
        util.Finalize(None, _end_child, exitpriority=_FIRST)
    if not _installed:
        _installed = True
        atexit.register(_leave_all)
        os.register_at_fork(after_in_child=_disown_all)
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            _fail_all(error)
            previous(kind, error, trace)

        sys.excepthook = hook


class _FailsAtTheEnd:
    """A stderr whose last flush by the interpreter fails. See [Note: exit code]."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("the process has ended with an error")


def call_at_exit(leave: Callable[[], None]) -> None:
    """Call `leave()` once when this process ends in good order, before its groups are left. Local.

    An exception that it raises is printed like an uncaught one, and makes the exit code nonzero.
    """
    if leave not in _leaves:
        _leaves[leave] = os.getpid()
        atexit.register(_call_in_order, leave)


def _call_in_order(leave: Callable[[], None]) -> None:
    # A forked child is not the rank. After an uncaught exception there is nothing to add, and the peers know.
    if _leaves[leave] != os.getpid() or getattr(sys, "last_value", None) is not None:
        return
    try:
        leave()
    except Exception as error:
        if shown_by is None or not shown_by(error):
            sys.excepthook(type(error), error, error.__traceback__)
        if sys.stderr is not None:
            sys.stderr = _FailsAtTheEnd(sys.stderr)


def _fail_all(error: BaseException) -> None:
    """Write `error` into the flight record of every open group."""
    message = describe_exception(error)
    for group in list(_groups):
        group.fail(message, error)


def _leave_all() -> None:
    for group in list(_groups):
        group.abort()


def _end_child() -> None:
    """Called when the target of a child has returned or raised. See [Note: children of multiprocessing]."""
    error = _fatal_error()
    if error is not None:
        _fail_all(error)
        _leave_all()
    elif "--multiprocessing-fork" not in sys.orig_argv and not _may_still_call():
        _leave_all()  # A spawned child still has to run its atexit handlers, and the user's may communicate.


def _may_still_call() -> bool:
    """Whether the process is waiting for user threads, which may call collectives."""
    waited_for = {each.ident for each in threading.enumerate() if not each.daemon}
    return bool(waited_for & threads_of_user())


def _fatal_error() -> BaseException | None:
    """The exception that ends this child; None if it ends in good order, or by a plain SystemExit."""
    error = sys.exc_info()[1]
    trace = None if error is None else error.__traceback__
    if trace is None or trace.tb_frame.f_code.co_name != "_bootstrap":
        return None  # the exception that the parent was handling when it forked
    if isinstance(error, SystemExit):
        # `torch.multiprocessing.spawn` stores the exception for the parent, and then exits.
        return error.__context__ if error.code else None
    return error


def _disown_all() -> None:
    for group in list(_groups):
        group.disown()
    _groups.clear()
