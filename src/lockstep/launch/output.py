"""Many ranks, one terminal: every line whole and with its rank in front.

Each rank writes into two pipes. One thread reads them all and writes to the launcher's own
stdout and stderr. It is a thread so that a slow reader at the other end (a pager, a stopped
terminal) holds back the ranks' output, as it would hold back a single process, and never
the launcher's watch over them.

Rules for a stream of bytes, of whatever encoding:

* A line is passed on when its newline has arrived, in one write. What is left at the end gets a newline.
* A carriage return makes the text before it provisional, as in a progress bar. A terminal shows
  it and lets the next text overwrite it; a file or pipe gets the final state, and what the
  bar shows every few seconds.
* A line of more than a megabyte is passed on in pieces, so memory stays bounded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import threading
import time

__all__ = ["Relay", "say", "write_all"]

_CHUNK_BYTES = 64 * 1024
_MAX_LINE_BYTES = 1024 * 1024
_PROGRESS_INTERVAL_S = 5.0
_ERASE_REST = b"\x1b[K"


def write_all(fd: int, data: bytes) -> None:
    """Write everything, waiting as long as the reader needs, also where `fd` is non-blocking.

    Raises:
        OSError: the other end is gone or the disk is full.
    """
    view = memoryview(data)
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    while view:
        with contextlib.suppress(BlockingIOError):
            view = view[os.write(fd, view) :]
            continue
        poll.poll()


def say(text: str) -> None:
    """Write to stderr past Python's buffers; without a reader there is nobody to tell."""
    with contextlib.suppress(OSError):
        write_all(2, text.encode("utf-8", "backslashreplace"))


class _Screen:
    """Whether the cursor stands at the start of a provisional line. Shared by stdout and stderr on one terminal."""

    def __init__(self) -> None:
        self.is_dirty = False


class _Sink:
    """Where lines go: the launcher's stdout or stderr."""

    def __init__(self, fd: int, screen: _Screen) -> None:
        self.fd = fd
        self.screen = screen
        self.error: OSError | None = None
        try:
            self.is_terminal = os.isatty(fd)
        except OSError:
            self.is_terminal = False

    def write(self, data: bytes) -> None:
        """Write, or drop it if this sink is broken."""
        if self.error is None and data:
            try:
                write_all(self.fd, data)
            except OSError as error:
                self.error = error

    def write_lines(self, prefix: bytes, lines: list[bytes]) -> None:
        """Write complete lines, each given without its newline."""
        if not lines:
            return
        first_end = _ERASE_REST + b"\n" if self.screen.is_dirty else b"\n"
        self.screen.is_dirty = False
        self.write(prefix + lines[0] + first_end + b"".join(prefix + line + b"\n" for line in lines[1:]))

    def write_provisional(self, prefix: bytes, text: bytes) -> None:
        """Show text on a terminal that the next write overwrites."""
        self.screen.is_dirty = True
        self.write(prefix + text + _ERASE_REST + b"\r")


class _Stream:
    """One pipe from one rank: bytes in, lines out."""

    def __init__(self, rank: int, fd: int, sink: _Sink) -> None:
        self.fd = fd
        self.sink = sink
        self._prefix = f"[{rank}] ".encode()
        self._pending = b""
        self._shown_at = time.monotonic()

    def read(self) -> bool:
        """Take what is there; False once the rank has closed it."""
        try:
            chunk = os.read(self.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            chunk = b""
        if chunk:
            self._feed(chunk)
        return bool(chunk)

    def drain(self) -> None:
        """Take everything that is there now, and end the last line."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.fd, _CHUNK_BYTES):
                self._feed(chunk)
        rest = _final_state(self._pending)
        self._pending = b""
        if rest.strip():  # A finished progress bar may have wiped itself with spaces.
            self.sink.write_lines(self._prefix, [rest])

    def _feed(self, chunk: bytes) -> None:
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        self.sink.write_lines(self._prefix, [_final_state(line) for line in lines])
        if b"\r" in self._pending:
            self._show_progress()
        if len(self._pending) > _MAX_LINE_BYTES:
            self.sink.write_lines(self._prefix, [_final_state(self._pending)])
            self._pending = b""

    def _show_progress(self) -> None:
        text = _final_state(self._pending)
        # Only the last state matters from here on; whatever it overwrote is forgotten.
        self._pending = text + b"\r" if self._pending.endswith(b"\r") else b"\r" + text
        if not text:
            return
        now = time.monotonic()
        if self.sink.is_terminal:
            self.sink.write_provisional(self._prefix, text)
        elif now - self._shown_at >= _PROGRESS_INTERVAL_S:
            self.sink.write_lines(self._prefix, [text])
            self._shown_at = now


def _final_state(line: bytes) -> bytes:
    """What a line with carriage returns shows in the end."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _same_terminal(first: int, second: int) -> bool:
    try:
        return os.isatty(first) and os.path.sameopenfile(first, second)
    except OSError:
        return False


class Relay:
    """Passes on the output of the ranks of one attempt.

    Call `attach` for each rank before it starts, `close_writers` after all have, then `finish`
    and, when `done_fd` is readable, `close`.

    Args:
        stdout: file descriptor that the ranks' stdout goes to.
        stderr: file descriptor that the ranks' stderr goes to.

    Attributes:
        broken_fd: readable once stdout or stderr cannot be written any more.
        done_fd: readable once everything has been passed on after `finish`.
    """

    def __init__(self, stdout: int = 1, stderr: int = 2) -> None:
        screen = _Screen()
        self._stdout = _Sink(stdout, screen)
        self._stderr = _Sink(stderr, screen if _same_terminal(stdout, stderr) else _Screen())
        self._writers: list[int] = []
        self._streams: list[_Stream] = []
        self._finish_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.broken_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.done_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="lockstep-output", daemon=True)

    @property
    def error(self) -> OSError | None:
        """Why stdout or stderr cannot be written any more, or None."""
        return self._stdout.error or self._stderr.error

    def attach(self, rank: int) -> tuple[int, int]:
        """New pipes for a rank: the file descriptors for its stdout and its stderr."""
        for sink in (self._stdout, self._stderr):
            read_fd, write_fd = os.pipe()
            os.set_blocking(read_fd, False)
            self._streams.append(_Stream(rank, read_fd, sink))
            self._writers.append(write_fd)
        return self._writers[-2], self._writers[-1]

    def close_writers(self) -> None:
        """All ranks are started: from now on only they hold the write ends. Starts the thread."""
        for fd in self._writers:
            os.close(fd)
        self._writers.clear()
        self._thread.start()

    def finish(self) -> None:
        """All ranks are gone: pass on what is still in the pipes, then make `done_fd` readable."""
        os.eventfd_write(self._finish_fd, 1)

    def close(self) -> None:
        """Release everything, if the thread is done. If it is stuck in a write, the process's end releases it."""
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
        """Until `finish` is called; a wait without a deadline, as the supervisor always calls it."""
        while True:
            for key, _ in selector.select():
                stream: _Stream | None = key.data
                if stream is None:
                    return
                if not stream.read():
                    selector.unregister(stream.fd)
                self._announce_breakage()

    def _announce_breakage(self) -> None:
        if self.error is not None and not self._is_broken:
            self._is_broken = True
            os.eventfd_write(self.broken_fd, 1)
