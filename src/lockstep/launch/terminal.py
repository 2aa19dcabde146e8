"""A pseudo terminal for a rank whose output ends on a terminal."""

from __future__ import annotations

import contextlib
import os
import struct

__all__ = ["fit", "open_terminal"]

_MIN_COLUMNS = 20


def open_terminal(like: int, prefix_columns: int) -> tuple[int, int] | None:
    """A pseudo terminal that hands on bytes as they are written, without echo.

    Args:
        like: descriptor of the terminal whose size it gets.
        prefix_columns: how many columns are not the rank's.

    Returns:
        The end to read from and the end for the rank; None if there is none to be had.
    """
    import tty  # not on Windows, where this package can be imported

    try:
        read_fd, write_fd = os.openpty()
    except OSError:  # a container without them, or too many
        return None
    tty.setraw(write_fd)
    fit(write_fd, like, prefix_columns)
    return read_fd, write_fd


def fit(fd: int, like: int, prefix_columns: int) -> None:
    """Give one terminal the size of another, less some columns."""
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
