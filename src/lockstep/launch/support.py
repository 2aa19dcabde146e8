"""Checks that this process can start and watch others: on Linux with pidfds, in an existing folder."""

from __future__ import annotations

import errno
import os

from lockstep import libc
from lockstep.errors import LaunchError

__all__ = ["check"]

_INSTEAD = (
    "Start the ranks with `torchrun --nproc-per-node N script.py`, in which lockstep.init() joins them, or one process "
    "with `python script.py`"
)


def check() -> None:
    """Raise if the launcher cannot work on this system. Local.

    Raises:
        LaunchError: this is not Linux, or a Linux without pidfds; says how to start ranks instead. Or the current
            folder was removed.
    """
    system = libc.foreign_system()
    if system is not None:
        raise LaunchError(f"lockstep starts processes on Linux only, and this is {system}. {_INSTEAD}")
    try:
        os.getcwd()
    except FileNotFoundError:  # torch's libraries cannot be loaded there
        raise LaunchError("the current folder of this process was removed; change into another") from None
    try:
        os.close(os.pidfd_open(os.getpid()))
    except AttributeError:
        raise LaunchError(f"this Python was built without pidfd_open (Linux 5.3). {_INSTEAD}") from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return  # code that needs descriptors gives a better error
        raise LaunchError(
            f"this system refuses pidfd_open ({error.strerror}), which watches processes: it needs Linux 5.3, and a "
            f"sandbox that allows the call. {_INSTEAD}"
        ) from None
