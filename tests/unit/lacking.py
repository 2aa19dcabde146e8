"""Hides from a program what other systems lack: `python lacking.py SYSTEM program.py`, for tests on Linux.

torch is imported first, because it is built for this system; whatever Lockstep asks for afterwards is not there.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import os
import platform
import runpy
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Callable
from typing import Any

# What they import themselves must not fail.
import torch.distributed
import torch.utils.data  # noqa: F401

_LINUX = {
    os: ("memfd_create", "MFD_CLOEXEC", "pidfd_open", "sched_getaffinity", "posix_fallocate", "pipe2"),
    signal: ("pidfd_send_signal",),
    time: ("CLOCK_BOOTTIME",),
}
_POSIX = {
    os: ("fork", "forkpty", "getuid", "geteuid", "getpgid", "killpg", "setsid", "sysconf", "uname", "mkfifo", "fchmod"),
    signal: ("SIGKILL", "SIGUSR1", "SIGHUP", "SIGCHLD", "SIGSTOP", "SIGALRM", "pthread_sigmask", "setitimer"),
    socket: ("AF_UNIX", "socketpair"),
}
_POSIX_FLAGS = ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY")
_POSIX_MODULES = ("fcntl", "resource", "termios", "pty", "tty", "pwd", "grp")


def _remove(names: dict[Any, tuple[str, ...]]) -> None:
    for module, attributes in names.items():
        for attribute in attributes:
            if hasattr(module, attribute):
                delattr(module, attribute)


def _without_proc(function: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(path: Any, *values: Any, **options: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc", "/sys", "/dev/shm")):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        return function(path, *values, **options)

    return refuse


def _hide_proc() -> None:
    for module, names in ((builtins, ("open",)), (io, ("open",)), (os, ("open", "stat", "listdir", "scandir"))):
        for name in names:
            setattr(module, name, _without_proc(getattr(module, name)))


def hide_for_macos() -> None:
    """No memfd, pidfd, futex, affinity, `/proc`."""
    _remove(_LINUX)
    _hide_proc()
    sys.platform = "darwin"


def hide_for_windows() -> None:
    """Nor fork, POSIX signals, `fcntl`, `resource`, a libc of the process."""
    hide_for_macos()
    _remove({**_POSIX, os: (*_POSIX[os], *_POSIX_FLAGS)})
    for name in _POSIX_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    libc = ctypes.CDLL

    def no_name(name: str | None, *values: Any, **options: Any) -> Any:
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        return libc(name, *values, **options)

    ctypes.CDLL = no_name  # type: ignore[misc, assignment]
    sys.platform = "win32"


def hide_for_sandbox() -> None:
    """Linux behind a filter that refuses memfds, pidfds and futexes."""

    def refuse(*_: Any) -> Any:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    os.memfd_create = os.pidfd_open = refuse  # type: ignore[assignment]
    platform.machine = lambda: "unknown"


if __name__ == "__main__":
    sysconfig.get_config_vars()  # of this interpreter, before it is told another system
    _, system, program, *arguments = sys.argv
    hide = {"linux": None, "macos": hide_for_macos, "windows": hide_for_windows, "sandbox": hide_for_sandbox}[system]
    if hide is not None:
        hide()
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
