"""Ranks that are forked from the launcher, which has already imported what they need, instead of started as programs.

Importing torch takes seconds, a fork milliseconds. A forked rank then does what `worker.py` does, with the launcher's
modules and interpreter, in its own environment and with its own streams. This is for launchers that have no threads and
have computed nothing: neither OpenMP nor CUDA survives a fork. `lockstep verify` is one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing import util
from typing import NoReturn

from lockstep import env
from lockstep.launch import worker

__all__ = ["ForkedProcess", "empty_inherited_descriptors"]

_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGUSR1, signal.SIGCHLD)


class ForkedProcess:
    """A child of this process, with the part of the interface of `subprocess.Popen` that `RankProcess` uses.

    Args:
        arguments: the arguments of `worker.py`.
        environment: all environment variables of the child.
        streams: descriptors for its stdin, stdout and stderr; None for this process's own.

    Attributes:
        pid: pid of the child, which leads a new session.

    Raises:
        OSError: no process can be created.
    """

    def __init__(self, arguments: list[str], environment: Mapping[str, str], streams: tuple[int | None, ...]) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        gc.freeze()  # so that collections in the child do not touch the shared pages, which would copy them all
        self.pid = os.fork()
        if self.pid == 0:
            _become_rank(arguments, environment, streams)

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        """Reap it, if it has exited."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0 if timeout is None else os.WNOHANG)


def _become_rank(arguments: list[str], environment: Mapping[str, str], streams: tuple[int | None, ...]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        _take(environment, streams)
        if "torch" in sys.modules:
            # torch replaces its thread pool, which the fork has left unusable, at its first use: of two threads that
            # come at once, one finds none ("Invalid thread pool!").
            torch = sys.modules["torch"]
            torch.set_num_threads(torch.get_num_threads())
        worker.main(arguments)
        code = 0
    except SystemExit as leaving:
        code = worker.code_of_exit(leaving)
        if leaving.code is not None and not isinstance(leaving.code, int):  # `sys.exit("no data")`
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _take(environment: Mapping[str, str], streams: tuple[int | None, ...], kept: tuple[int, ...] = ()) -> None:
    """Replace what belongs to the launcher: its signal handlers, descriptors but `kept`, variables, exit handlers."""
    signal.set_wakeup_fd(-1)
    for number in _HEARD:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for target, source in enumerate(streams):
        if source == subprocess.DEVNULL:
            os.dup2(os.open(os.devnull, os.O_RDWR), target)
        elif source is not None:
            os.dup2(source, target)
    empty_inherited_descriptors(kept)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, closefd=False, errors="replace") for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    atexit._clear()
    atexit.register(util._exit_function)  # type: ignore[attr-defined]  # joins the script's own processes
    env.replace(environment)


def empty_inherited_descriptors(kept: tuple[int, ...] = ()) -> None:
    """Make all descriptors but `kept` and the standard ones refer to /dev/null.

    Not closed: an object from before the fork closes its descriptor when it is freed, maybe much later. By then the
    number would be that of a socket of this process.
    """
    inherited = [int(number) for number in os.listdir("/proc/self/fd")]
    null = os.open(os.devnull, os.O_RDWR)  # its number was that of the listing
    for number in inherited:
        if number > 2 and number not in (null, *kept):
            os.dup2(null, number, inheritable=False)


def _end(code: int) -> NoReturn:
    """Exit like the interpreter does, but without exit handlers from before the fork."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
