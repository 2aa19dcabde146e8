"""Tells the peers how this process ends, so that they need not find out by waiting.

Installed once, when the first group is made: an exit handler that leaves every group still open,
an exception hook that first writes the exception into the flight record, and a fork handler by
which a child (a worker of a DataLoader, say) gives up the groups that it inherited, because its end
is not the end of the rank.

[Note: exit code] What an exit handler raises is printed, and changes nothing: the process ends with 0. Python's own way
to end with another code by then is an error while it flushes stderr, last of all; the code is 120 (`sys.exit`). So an
error of ours at the end lets that flush fail, after all other exit handlers have run.

[Note: children of multiprocessing] A process that multiprocessing started, and that is a rank itself, handles its own
exceptions, and a forked one ends without atexit's handlers. There a finalizer of multiprocessing does what they would;
it runs while the exception that ends the process is on its way.
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
_leaves: dict[Callable[[], None], int] = {}  # and the process that has asked for it
_child_pid = 0  # of the process that has the finalizer
shown_by: Callable[[Exception], bool] | None = None
"""How the launcher hears of what `call_at_exit` raises; whether it shows the error, so that this process need not."""
_FIRST = 100  # priority of the finalizer: before those that wait for processes or threads


def register(group: _Group) -> None:
    """Tell `group` when this process ends. Local."""
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
    """A stderr of which the interpreter's last flush fails. See [Note: exit code]."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("the process has ended with an error")


def call_at_exit(leave: Callable[[], None]) -> None:
    """Have `leave()` called once when this process ends in good order, before its groups are left. Local.

    What it raises is printed as an uncaught exception is, and makes an exit code that is not 0.
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
    """The target of a child has returned or raised. See [Note: children of multiprocessing]."""
    error = _fatal_error()
    if error is not None:
        _fail_all(error)
        _leave_all()
    elif "--multiprocessing-fork" not in sys.orig_argv and not _may_still_call():
        _leave_all()  # A spawned child has atexit's handlers yet to run, of which the user's may communicate.


def _may_still_call() -> bool:
    """Whether the process waits for threads of the user's, which may call collectives."""
    waited_for = {each.ident for each in threading.enumerate() if not each.daemon}
    return bool(waited_for & threads_of_user())


def _fatal_error() -> BaseException | None:
    """The exception that ends this child; None if it ends in good order, or by SystemExit as such."""
    error = sys.exc_info()[1]
    trace = None if error is None else error.__traceback__
    if trace is None or trace.tb_frame.f_code.co_name != "_bootstrap":
        return None  # One that the parent was handling when it forked.
    if isinstance(error, SystemExit):
        # `torch.multiprocessing.spawn` stores the exception for the parent, and then exits.
        return error.__context__ if error.code else None
    return error


def _disown_all() -> None:
    for group in list(_groups):
        group.disown()
    _groups.clear()
