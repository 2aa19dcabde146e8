"""Splits the output of one rank into lines: from a pipe, or from a pseudo terminal.

[Note: a rank's terminal] A program that detects a terminal moves the cursor: back to the start of a line (a bar), or up
over lines that it has written (several bars, a table that changes). The launcher passes a move up on to the terminal
only if no other rank has written below; otherwise it prints those lines again. Bars of ranks other than the shown ones
do not move: the launcher keeps their text until the rank can no longer overwrite it, so nothing is lost and nothing is
shown twice. Other sequences, including colours, pass through unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time

from lockstep.launch.screen import Sink

__all__ = ["PARTIAL_S", "RankStream", "TerminalStream"]

PARTIAL_S = 0.1
"""Seconds of silence after which the beginning of a line is shown, as it may be a question."""
_CHUNK_BYTES = 64 * 1024
_MAX_LINE_BYTES = 1024 * 1024
_MAX_ROWS = 100
_PROGRESS_INTERVAL_S = 5.0
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_TOKEN = re.compile(
    rb"(?P<newline>\n)|(?P<restart>\r)|\x1b\[(?P<up>\d*)A|(?P<erase>\x1b\[[012]?[JK])|\x1b\[\?25(?P<cursor>[lh])"
)
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-9;?]*)?\Z")
_RESET = b"\x1b[0m"
_SHOW_CURSOR = b"\x1b[?25h"


class RankStream:
    """One pipe from one rank, split into lines.

    Args:
        rank: the rank that writes.
        fd: non-blocking descriptor to read from.
        sink: receives the lines.
        has_bars: whether to show, on a terminal, text that may still be overwritten.
    """

    def __init__(self, rank: int, fd: int, sink: Sink, *, has_bars: bool = True) -> None:
        self.rank = rank
        self.fd = fd
        self.sink = sink
        self._has_bars = has_bars
        self._prefix = f"[{rank}] ".encode()
        self._pending = b""
        self._shown_at = time.monotonic()

    def read(self) -> bool:
        """Read what is available; False once the rank has closed its end."""
        try:
            chunk = self._read_some()
        except BlockingIOError:
            return True
        if chunk:
            self._feed(chunk)
        return bool(chunk)

    def drain(self) -> None:
        """Take everything that is available now, and end the last line."""
        self._read_all()
        rest = _final_state(self._pending)
        self._pending = b""
        if rest.strip():  # a finished progress bar may have erased itself with spaces
            self.sink.write_lines(self._prefix, [rest], self)

    @property
    def has_partial(self) -> bool:
        """Whether there is the beginning of a line that a terminal could show."""
        return False

    def show_partial(self) -> None:
        """Show the beginning of a line, after a pause."""

    def _read_some(self) -> bytes:
        try:
            return os.read(self.fd, _CHUNK_BYTES)
        except OSError as error:
            if error.errno != errno.EIO:  # how a terminal reports that its other end is closed
                raise
            return b""

    def _read_all(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := self._read_some():
                self._feed(chunk)

    def _feed(self, chunk: bytes) -> None:
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        self.sink.write_lines(self._prefix, [_final_state(line) for line in lines], self)
        if b"\r" in self._pending:
            self._show_progress()
        if len(self._pending) > _MAX_LINE_BYTES:
            self.sink.write_lines(self._prefix, [_final_state(self._pending)], self)
            self._pending = b""

    def _show_progress(self) -> None:
        text = _final_state(self._pending)
        # Only the last state matters from here on; the text that it overwrote is discarded.
        self._pending = text + b"\r" if self._pending.endswith(b"\r") else b"\r" + text
        if not text:
            return
        now = time.monotonic()
        if self.sink.can_overwrite:
            if self._has_bars:
                self.sink.write_provisional(self._prefix, text, self)
        elif now - self._shown_at >= _PROGRESS_INTERVAL_S:
            self.sink.write_lines(self._prefix, [text], self)
            self._shown_at = now


class TerminalStream(RankStream):
    """The terminal of one rank: see [Note: a rank's terminal]."""

    def __init__(self, rank: int, fd: int, sink: Sink, *, has_bars: bool = True) -> None:
        super().__init__(rank, fd, sink, has_bars=has_bars)
        self._unfinished = b""  # beginning of an escape sequence
        self._line = b""
        self._above: list[bytes] = []  # lines that it may go up to; not written yet if its bars are held back
        self._below: list[bytes] = []  # lines from which it went up
        self._restarts = False  # the next text overwrites the line
        self._is_bar = False  # some text of the line has been overwritten
        self._is_live = False  # the cursor is hidden, as while a display changes
        self._is_shown = True

    @property
    def has_partial(self) -> bool:
        """Whether there is the beginning of a line that has not been shown."""
        return not self._is_shown

    def show_partial(self) -> None:
        """Show the beginning of a line after a pause, with the cursor after it."""
        if not self._is_shown:
            self._is_shown = True
            self.sink.write_provisional(self._prefix, self._line, self, end=b"")

    def drain(self) -> None:
        self._read_all()
        lines = [] if self._has_bars else self._above
        if self._below or _ANSI.sub(b"", self._line).strip():
            lines = [*lines, self._line, *self._below]
        self._above, self._line, self._below = [], b"", []
        self._write(lines)
        if self._is_live and self._has_bars:
            self.sink.write(_SHOW_CURSOR)

    def _feed(self, chunk: bytes) -> None:
        data = self._unfinished + chunk
        unfinished = _UNFINISHED.search(data)
        end = len(data) if unfinished is None else unfinished.start()
        self._unfinished, data = data[end:], data[:end]
        lines: list[bytes] = []
        start = 0
        for token in _TOKEN.finditer(data):
            self._add(data[start : token.start()])
            start = token.end()
            self._follow(token, lines)
        self._add(data[start:])
        if len(self._line) > _MAX_LINE_BYTES:
            self._end_line(lines)
        self._write(lines)
        self._show()

    def _add(self, text: bytes) -> None:
        if text:
            self._is_bar = self._is_bar or self._restarts
            self._line = text if self._restarts else self._line + text
            self._restarts = False

    def _follow(self, token: re.Match[bytes], lines: list[bytes]) -> None:
        """Follow a control sequence; adds complete lines to `lines`."""
        if token["newline"]:
            self._end_line(lines)
        elif token["restart"]:
            self._restarts = True
        elif token["erase"]:
            if self._restarts or token["erase"] == b"\x1b[2K":
                self._line = b""
        elif token["cursor"]:
            self._is_live = token["cursor"] == b"l"
            if self._has_bars:
                self.sink.write(token.group())
        else:
            self._go_up(int(token["up"] or 1), lines)

    def _end_line(self, lines: list[bytes]) -> None:
        may_change = self._is_bar or self._is_live or bool(self._below)
        self._above.append(self._line)
        if self._has_bars:
            lines.append(self._line)
            del self._above[:-_MAX_ROWS]
        elif not may_change or len(self._above) > _MAX_ROWS:
            lines += self._above
            self._above.clear()
        self._line = self._below.pop(0) if self._below else b""
        self._is_bar = False
        self._restarts = bool(self._line)

    def _go_up(self, num_lines: int, lines: list[bytes]) -> None:
        num_lines = min(num_lines, len(self._above))
        if self._has_bars:
            self._write(lines)
            lines.clear()
            self._paint()
            self.sink.go_up(num_lines, self)
        for _ in range(num_lines):
            self._below.insert(0, self._line)
            self._line = self._above.pop()
        self._restarts = self._is_bar = True

    def _show(self) -> None:
        """Show the current state of the line, if it may change; otherwise after a pause."""
        if self._restarts or self._is_bar or self._is_live:
            if self._has_bars and self._line:
                self._paint()
            self._is_shown = True
        else:
            self._is_shown = not self._line

    def _paint(self) -> None:
        self.sink.write_provisional(self._prefix if self._line else b"", _closed(self._line), self)

    def _write(self, lines: list[bytes]) -> None:
        self.sink.write_lines(self._prefix, [_closed(line) for line in lines], self)


def _closed(line: bytes) -> bytes:
    """The line, ended such that its colours do not affect lines of other ranks."""
    last = line.rfind(b"\x1b[")
    return line if last < 0 or line.startswith((_RESET, b"\x1b[m"), last) else line + _RESET


def _final_state(line: bytes) -> bytes:
    """The text that a line with carriage returns finally shows."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
