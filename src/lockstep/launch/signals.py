"""Makes the launcher's signals readable from a descriptor; during imports Ctrl-C ends the command with one line."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType

__all__ = ["SignalWatch", "ends_by_ctrl_c"]

_INTERRUPTED_CODE = 128 + signal.SIGINT


@contextlib.contextmanager
def ends_by_ctrl_c() -> Iterator[None]:
    """Context manager in which Ctrl-C ends the process at once, with one line. For the imports of a command.

    KeyboardInterrupt would print a traceback of Python's own modules, some of which swallow it, such as the callbacks
    of the import locks. Other handlers are kept, and outside the main thread nothing changes.
    """
    is_free = threading.current_thread() is threading.main_thread()
    if not is_free or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"lockstep: Ctrl-C\n")
    os._exit(_INTERRUPTED_CODE)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the number is also written to the wakeup pipe."""


class SignalWatch:
    """Context manager in which SIGINT, SIGTERM, SIGHUP, SIGTSTP and SIGUSR1 arrive at `fileno()` without other effect.

    A signal that was ignored before stays ignored (`nohup`, or `&` in a script). Outside the main thread Python allows
    no handlers, and signals keep their effects.
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous: dict[int, signal._HANDLER] = {}
        self._previous_wakeup_fd = -1
        self._is_installed = False

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._is_installed = True
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGUSR1):
            # None: a handler that was not installed by Python and could not be restored.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._previous[number] = signal.signal(number, _ignore)
        # Ranks are waited for by pid, which is impossible if SIGCHLD is ignored.
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_installed:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def fileno(self) -> int:
        """A descriptor that is readable when a signal has arrived."""
        return self._read_fd

    def read(self) -> list[int]:
        """The numbers of the signals that arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self._read_fd, 4096) if number in self._previous]
        return []
