"""Descriptors 0, 1 and 2, which a shell may have closed (`command >&-`)."""

from __future__ import annotations

import os

__all__ = ["fill_closed"]


def fill_closed() -> None:
    """Open /dev/null wherever stdin, stdout or stderr is closed. At the start of a program, before it opens anything.

    Else the next thing that is opened, such as the pipe of the signals, gets the number, and what is written to stdout
    goes there.
    """
    for fd in (0, 1, 2):
        if not _is_open(fd):
            # The lowest free number, hence this one. Ranks inherit it, as they would the stream.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
