"""The output of many ranks on one terminal: every line complete and with its rank in front.

Each rank writes into two pipes, or, if the launcher's output is a terminal, into a pseudo terminal, so that it detects
one and prints in colour. One thread reads them all and writes to the launcher's own stdout and stderr. It is a thread
so that a slow reader at the other end (a pager, a stopped terminal) blocks the ranks' output, as it would block a
single process, but never the launcher's monitoring.

Rules for a stream of bytes, of whatever encoding:

* A line is passed on when its newline has arrived, in one write. What is left at the end gets a newline.
* A carriage return makes the text before it provisional, as in a progress bar. A terminal shows it and lets the next
  text overwrite it; a file or pipe gets the final state, and the bar's current state every few seconds. On a terminal
  only the first rank's bars move, unless all are requested: there is only one line for them, so they would alternate.
* A line of more than a megabyte is passed on in pieces, so memory stays bounded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import struct
import threading
import time
from typing import TextIO

from lockstep.launch.screen import FileSink, Screen, Sink
from lockstep.launch.streams import PARTIAL_S, RankStream, TerminalStream

__all__ = ["Relay"]

_FIT_INTERVAL_S = 1.0
_MIN_COLUMNS = 20


def _prefix_columns(rank: int) -> int:
    """Width of the prefix, plus one: a line that ends at the edge of a terminal is not erased cleanly."""
    return len(f"[{rank}] ") + 1


def _open_sink(target: int | TextIO, screen: Screen) -> Sink:
    return Sink(target, screen) if isinstance(target, int) else FileSink(target)


def _are_one_terminal(first: int | TextIO, second: int | TextIO) -> bool:
    if not (isinstance(first, int) and isinstance(second, int)):
        return False
    try:
        return os.isatty(first) and os.path.sameopenfile(first, second)
    except OSError:
        return False


class Relay:
    """Passes on the output of the ranks of one attempt.

    Call `attach` for each rank before it starts, `close_writers` after all have, then `finish` and, when `done_fd` is
    readable, `close`.

    Args:
        stdout: receives the ranks' stdout: a file descriptor, or a text stream without one.
        stderr: receives the ranks' stderr.
        all_bars: if lines can be overwritten, show the progress bars of all ranks, not only of the first attached.

    Attributes:
        broken_fd: readable once stdout or stderr is no longer writable.
        done_fd: readable once everything has been passed on after `finish`.
    """

    def __init__(self, stdout: int | TextIO = 1, stderr: int | TextIO = 2, *, all_bars: bool = False) -> None:
        self._all_bars = all_bars
        screen = Screen()
        self._stdout = _open_sink(stdout, screen)
        self._stderr = _open_sink(stderr, screen if _are_one_terminal(stdout, stderr) else Screen())
        self._writers: list[int] = []
        self._streams: list[RankStream] = []
        self._first_rank = -1
        self._finish_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.broken_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.done_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="lockstep-output", daemon=True)

    @property
    def error(self) -> OSError | None:
        """The error that ended writing to stdout or stderr, or None."""
        return self._stdout.error or self._stderr.error

    def attach(self, rank: int) -> tuple[int, int]:
        """Open the file descriptors for a rank's stdout and stderr."""
        has_bars = self._all_bars or not self._streams or self._first_rank == rank
        if has_bars and not self._all_bars:
            self._first_rank = rank
        stdout = self._open(rank, self._stdout, has_bars)
        if self._stdout.screen is self._stderr.screen and isinstance(self._streams[-1], TerminalStream):
            self._writers.append(os.dup(stdout))  # keeps its output in order
            return stdout, self._writers[-1]
        return stdout, self._open(rank, self._stderr, has_bars)

    def _open(self, rank: int, sink: Sink, has_bars: bool) -> int:
        ends = _open_terminal(sink.fd, _prefix_columns(rank)) if sink.is_terminal else None
        kind = RankStream if ends is None else TerminalStream
        read_fd, write_fd = ends or os.pipe()
        os.set_blocking(read_fd, False)
        self._streams.append(kind(rank, read_fd, sink, has_bars=has_bars))
        self._writers.append(write_fd)
        return write_fd

    def close_writers(self) -> None:
        """Close our write ends, once all ranks have been started and have theirs, and start the thread.

        Raises:
            OSError: no thread can be started.
        """
        for fd in self._writers:
            os.close(fd)
        self._writers.clear()
        try:
            self._thread.start()
        except RuntimeError as error:  # how Python reports EAGAIN here
            raise OSError(errno.EAGAIN, str(error)) from error

    def end(self, timeout_s: float) -> None:
        """Pass on the rest, for `timeout_s` at most, and release everything. Call it after all ranks have ended."""
        if self._thread.ident is not None:
            self.finish()
            poll = select.poll()
            poll.register(self.done_fd, select.POLLIN)
            poll.poll(timeout_s * 1000)
        self.close()

    def finish(self) -> None:
        """Pass on what is left in the pipes, then make `done_fd` readable. Call it after all ranks have ended."""
        os.eventfd_write(self._finish_fd, 1)

    def close(self) -> None:
        """Release everything, if the thread has ended. If it is stuck in a write, that is left to the process's end."""
        for fd in self._writers:
            os.close(fd)
        self._writers.clear()
        if self._thread.ident is not None:
            self._thread.join(timeout=0.1)
            if self._thread.is_alive():
                return
        for fd in (*(stream.fd for stream in self._streams), self._finish_fd, self.broken_fd, self.done_fd):
            os.close(fd)
        self._streams.clear()

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._finish_fd, selectors.EVENT_READ, None)
                for stream in self._streams:
                    selector.register(stream.fd, selectors.EVENT_READ, stream)
                self._pass_on(selector)
            for stream in self._streams:
                stream.drain()
                self._announce_breakage()
        finally:
            os.eventfd_write(self.done_fd, 1)

    def _pass_on(self, selector: selectors.BaseSelector) -> None:
        """Pass on output until `finish` is called, which the supervisor always does: a wait without a deadline."""
        fitted_at = time.monotonic()
        while True:
            has_partial = any(stream.has_partial for stream in self._streams)
            ready = selector.select(PARTIAL_S if has_partial else None)
            for key, _ in ready:
                stream: RankStream | None = key.data
                if stream is None:
                    return
                if not stream.read():
                    selector.unregister(stream.fd)
                self._announce_breakage()
            if not ready:
                for stream in self._streams:
                    stream.show_partial()
            if time.monotonic() - fitted_at >= _FIT_INTERVAL_S:
                fitted_at = time.monotonic()
                self._fit()

    def _fit(self) -> None:
        """Set the size of the ranks' terminals to the current size of ours."""
        for stream in self._streams:
            if isinstance(stream, TerminalStream):
                _fit(stream.fd, stream.sink.fd, _prefix_columns(stream.rank))

    def _announce_breakage(self) -> None:
        if self.error is not None and not self._is_broken:
            self._is_broken = True
            os.eventfd_write(self.broken_fd, 1)


# ---- pseudo terminals ----------------------------------------------------------------------------------


def _open_terminal(like: int, prefix_columns: int) -> tuple[int, int] | None:
    """Open a pseudo terminal that passes on bytes as they are written, without echo.

    Args:
        like: descriptor of the terminal whose size it gets.
        prefix_columns: number of columns that the rank cannot use.

    Returns:
        The end to read from and the end for the rank; None if none is available.
    """
    import tty  # not on Windows, where this package can still be imported

    try:
        read_fd, write_fd = os.openpty()
    except OSError:  # a container without pseudo terminals, or too many
        return None
    tty.setraw(write_fd)
    _fit(write_fd, like, prefix_columns)
    return read_fd, write_fd


def _fit(fd: int, like: int, prefix_columns: int) -> None:
    """Set the size of one terminal to that of another, less some columns."""
    with contextlib.suppress(OSError):
        rows, columns = _size(like)
        wanted = (rows, max(columns - prefix_columns, _MIN_COLUMNS)) if columns else (rows, columns)
        if _size(fd) != wanted:
            _set_size(fd, wanted)


def _size(fd: int) -> tuple[int, int]:
    size = os.get_terminal_size(fd)
    return size.lines, size.columns


def _set_size(fd: int, size: tuple[int, int]) -> None:
    # termios.tcsetwinsize came with Python 3.11.
    import fcntl
    import termios

    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
