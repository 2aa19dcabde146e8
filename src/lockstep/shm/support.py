"""What sharing memory requires of the system, and the substitutes if something is missing.

| system call | if it is missing |
|---|---|
| memfd_create | segments are files in LOCKSTEP_SHM_DIR, else in /dev/shm |
| pidfd_open | `/proc/<pid>/stat` tells which processes are running (`liveness.py`) |
| futex | waits yield the core instead of sleeping (`sync.py`) |
| `/proc`, Linux | no memory is shared: `lockstep.init()` uses gloo |
"""

from __future__ import annotations

import functools
import os

from lockstep import env, libc

__all__ = ["has_memfd", "lack", "segment_folder"]

_FOLDER = "/dev/shm"


@functools.cache
def has_memfd() -> bool:
    """Whether files without a name can be created here: not on other systems, nor if a filter blocks the call."""
    try:
        os.close(os.memfd_create("lockstep-probe", os.MFD_CLOEXEC))
    except (AttributeError, OSError):
        return False
    return True


def segment_folder() -> str | None:
    """The folder for segment files; None if they need no name."""
    chosen = env.LOCKSTEP_SHM_DIR.get()
    return chosen if chosen is not None or has_memfd() else _FOLDER


def lack() -> str | None:
    """Why ranks cannot share memory here, as a clause; None if they can. Local."""
    system = libc.foreign_system()
    if system is not None:
        return f"shared memory between ranks needs Linux, and this is {system}"
    if not _can_see_processes():
        return "shared memory between ranks needs /proc, which is not mounted here"
    folder = segment_folder()
    if folder == _FOLDER and not has_memfd() and not os.access(_FOLDER, os.W_OK):
        return "this system refuses memfd_create, and /dev/shm cannot be written: set LOCKSTEP_SHM_DIR to a folder"
    return None


def _can_see_processes() -> bool:
    return os.path.exists("/proc/self/stat") and os.path.exists("/proc/sys/kernel/random/boot_id")
