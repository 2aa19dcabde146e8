"""Descriptors 0, 1 and 2, which a shell may have closed (`command >&-`)."""

from __future__ import annotations

import os

__all__ = ["fill_closed"]


def fill_closed() -> None:
    """Open /dev/null wherever stdin, stdout or stderr is closed. Call it before the program opens anything.

    Otherwise the next descriptor that is opened, such as the pipe of the signals, gets that number, and receives what
    is written to stdout.
    """
    for fd in (0, 1, 2):
        if not _is_open(fd):
            # The lowest free number, hence this one. Ranks inherit it, like the stream.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
