"""Hides from a program what other systems lack: `python lacking.py SYSTEM program.py`, for tests on Linux.

torch is imported first, because it is built for this system; whatever Lockstep asks for afterwards is not there.
Without words, it runs several programs that it reads of in stdin, in forks of a process that has imported torch.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import importlib
import io
import json
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
import torch
import torch.distributed
import torch.utils.data

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


_HIDE = {"linux": None, "macos": hide_for_macos, "windows": hide_for_windows, "sandbox": hide_for_sandbox}


def _fork_all(requests: list[dict[str, Any]]) -> None:
    """Run a program for each request in a fork of this process, all at once, and print their exit codes.

    Returns in each fork, which has `sys.argv` then as if it had been started alone.
    """
    importlib.import_module("torch._dynamo")  # which the first optimizer would import, in seconds
    pids = []
    for request in requests:
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(request["variables"])
            for number, name in enumerate(request["streams"], start=1):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
            torch.set_num_threads(1)  # before any thread asks for the pool, which no fork has
            sys.argv[1:] = request["words"]
            return
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))
    sys.exit()


if __name__ == "__main__":
    sysconfig.get_config_vars()  # of this interpreter, before it is told another system
    if len(sys.argv) == 1:
        _fork_all(json.load(sys.stdin))
    _, system, program, *arguments = sys.argv
    hide = _HIDE[system]
    if hide is not None:
        hide()
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
