"""Processes that a script starts with multiprocessing, and how they end.

Records `child` for each that failed and whose exit code was not read: `name`, the `function` that it ran, and `code`
(negative for a signal). A process that the script stopped with `terminate` or `kill` has not failed.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess, active_children
from typing import Any

from lockstep.tools.rehearse.line import Site
from lockstep.tools.rehearse.patching import replace, wrap
from lockstep.tools.rehearse.sites import chain
from lockstep.tools.rehearse.watch.recorder import recorder

__all__ = ["install"]

# Each with the pid that started it, as a forked process inherits its parent's entries.
_started: list[tuple[int, BaseProcess, tuple[Site, ...], str]] = []
# Those that the script stopped, or whose exit code it has read.
_known: set[BaseProcess] = set()
_exitcode: Any = BaseProcess.exitcode


def _start(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(self: BaseProcess) -> None:
        function = getattr(getattr(self, "_target", None), "__qualname__", type(self).__qualname__)
        original(self)
        _started.append((os.getpid(), self, chain(), function))

    return start


def _stop(original: Callable[..., Any]) -> Callable[..., Any]:
    def stop(self: BaseProcess) -> None:
        if _exitcode.fget(self) is None:
            _known.add(self)
        original(self)

    return stop


def _ask(self: BaseProcess) -> int | None:
    """`exitcode`."""
    code: int | None = _exitcode.fget(self)
    if code is not None:
        _known.add(self)
    return code


def _wait() -> None:
    """Join all children that are not daemons, as multiprocessing does later at exit."""
    for child in active_children():
        if not child.daemon:
            child.join()


def _finish() -> None:
    for starter, child, sites, function in _started:
        code = _exitcode.fget(child) if starter == os.getpid() and child not in _known else None
        if code:
            recorder.note("child", sites, name=child.name, function=function, code=code)


def install() -> None:
    """Watch multiprocessing's processes."""
    wrap(BaseProcess, "start", _start)
    for name in ("terminate", "kill"):
        wrap(BaseProcess, name, _stop)
    replace(BaseProcess, "exitcode", property(_ask, doc=_exitcode.__doc__))
    recorder.finishers.append(_finish)
    atexit.register(_wait)  # before the record is written: what is registered last runs first
