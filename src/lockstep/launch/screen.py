"""Writes the ranks' lines: to the launcher's stdout and stderr, and at the bottom of a terminal."""

from __future__ import annotations

import contextlib
import os
import select
from typing import TextIO

__all__ = ["FileSink", "Screen", "Sink", "say", "write_all"]

_ERASE_REST = b"\x1b[K"


def write_all(fd: int, data: bytes) -> None:
    """Write everything, waiting as long as the reader needs, even if `fd` is non-blocking.

    Raises:
        OSError: the other end is closed or the disk is full.
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
    """Write to stderr without Python's buffers; do nothing if it has no reader."""
    with contextlib.suppress(OSError):
        write_all(2, text.encode("utf-8", "backslashreplace"))


class Screen:
    """The bottom of a terminal. Shared by stdout and stderr if they go to the same one.

    Attributes:
        is_dirty: the cursor's line shows text that the next write overwrites.
        is_behind: the cursor is at the end of that text, not at the start of the line.
        owner: the stream that wrote the last lines.
        rows: number of that stream's lines directly above the cursor.
        below: number of that stream's lines below the cursor, after it went up.
    """

    def __init__(self) -> None:
        self.is_dirty = False
        self.is_behind = False
        self.owner: object = None
        self.rows = 0
        self.below = 0

    def take_over(self, owner: object) -> bytes:
        """Make `owner` the stream that writes; returns what to write first, to get below another stream's lines."""
        if owner is self.owner:
            return b""
        leave = b"\x1b[%dB\n" % self.below if self.below else b""
        self.is_dirty = self.is_dirty and not leave
        self.owner, self.rows, self.below = owner, 0, 0
        return leave


class Sink:
    """Writes lines to the launcher's stdout or stderr.

    Attributes:
        error: the error that ended writing, or None.
        is_terminal: whether it is a terminal, so that ranks get one too.
        can_overwrite: whether it can show text that a later write overwrites.
    """

    def __init__(self, fd: int, screen: Screen) -> None:
        self.fd = fd
        self.screen = screen
        self.error: OSError | None = None
        try:
            self.is_terminal = os.isatty(fd)
        except OSError:
            self.is_terminal = False
        self.can_overwrite = self.is_terminal

    def write(self, data: bytes) -> None:
        """Write, or discard the data if this sink is broken."""
        if self.error is None and data:
            try:
                write_all(self.fd, data)
            except OSError as error:
                self.error = error

    def write_lines(self, prefix: bytes, lines: list[bytes], owner: object = None) -> None:
        """Write complete lines, each given without its newline."""
        if not lines:
            return
        screen = self.screen
        parts = [self._go_back(), screen.take_over(owner)]
        for line in lines:
            must_erase = screen.is_dirty or screen.below > 0
            parts += [prefix, line, _ERASE_REST if must_erase else b"", b"\n"]
            screen.is_dirty = False
            screen.rows += 1
            screen.below = max(screen.below - 1, 0)
        self.write(b"".join(parts))

    def write_provisional(self, prefix: bytes, text: bytes, owner: object = None, end: bytes = b"\r") -> None:
        """Show text on a terminal that the next write overwrites."""
        leave = self._go_back() + self.screen.take_over(owner)
        self.screen.is_dirty = True
        self.screen.is_behind = not end
        self.write(leave + prefix + text + _ERASE_REST + end)

    def _go_back(self) -> bytes:
        """Move the cursor to the start of the line, if it is elsewhere."""
        is_behind, self.screen.is_behind = self.screen.is_behind, False
        return b"\r" if is_behind else b""

    def go_up(self, num_lines: int, owner: object) -> None:
        """Let the next lines of `owner` overwrite its last ones, unless another stream has written since."""
        screen = self.screen
        count = min(num_lines, screen.rows) if owner is screen.owner else 0
        if count:
            screen.rows -= count
            screen.below += count
            screen.is_dirty = True
            self.write(b"\r\x1b[%dA" % count)


class FileSink(Sink):
    """Python's `sys.stdout` or `sys.stderr`, if it is not a descriptor: the cell of a notebook, a test's capture."""

    def __init__(self, file: TextIO) -> None:
        self.fd = -1
        self.screen = Screen()
        self.error = None
        self.is_terminal = False
        self.can_overwrite = type(file).__module__.startswith("ipykernel.")
        self._file = file
        self._width = 0  # of the text that the next write overwrites

    def write(self, data: bytes) -> None:
        if self.error is None and data:
            try:
                self._file.write(data.decode("utf-8", "replace"))
                self._file.flush()
            except (OSError, ValueError) as error:  # ValueError: the stream was closed
                self.error = error if isinstance(error, OSError) else OSError(str(error))

    def write_lines(self, prefix: bytes, lines: list[bytes], owner: object = None) -> None:
        if lines:
            text = b"".join(prefix + line + b"\n" for line in lines)
            width, self._width = self._width, 0
            # Escape sequences do not erase here; spaces do.
            self.write((b"\r" + b" " * width + b"\r" if width else b"") + text)

    def write_provisional(self, prefix: bytes, text: bytes, owner: object = None, end: bytes = b"") -> None:
        """Show text that the next write overwrites."""
        width, self._width = self._width, len((prefix + text).decode("utf-8", "replace"))
        self.write((b"\r" if width else b"") + prefix + text + b" " * (width - self._width))
