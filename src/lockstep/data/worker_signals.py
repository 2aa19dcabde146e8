"""Worker processes of a loader leave signals to their rank.

Signals that stop a job reach its workers as well: a terminal's Ctrl-C, `kill` of a process group, and those of Slurm
and systemd. A worker that obeyed would take away the batches of a rank that wants to finish its step and save. So
workers ignore these signals, and end when their rank tells them to, when it ends, or, by the kernel, when it is killed.

[Note: ends of workers] When a process ends, multiprocessing sends SIGTERM to its remaining workers, and waits for them
without a limit. So a finalizer kills them before that. torch's handler of SIGCHLD would then raise an error about a
killed worker; by that time nobody waits for a batch.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import util

from lockstep import libc
from lockstep.stopping import signals_for_ranks

__all__ = ["Shield", "held_back"]

_KILL_PRIORITY = 50  # before multiprocessing ends its children, and after our groups have been left
_pids: set[int | None] = set()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """A context in which workers are started; signals are held back until the workers ignore them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows, which has no such signals
        yield
        return
    others = {process.pid for process in multiprocessing.active_children()}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals_for_ranks())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _pids.update({process.pid for process in multiprocessing.active_children()} - others)
        _kill_at_end(os.getpid())


@functools.cache
def _kill_at_end(_: int) -> None:
    """Once in each process, as a forked child has its own finalizers."""
    util.Finalize(None, _kill_workers, exitpriority=_KILL_PRIORITY)


def _kill_workers() -> None:
    """See [Note: ends of workers]."""
    workers = [each for each in multiprocessing.active_children() if each.daemon and each.pid in _pids]
    if workers and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in workers:
        worker.kill()


class Shield:
    """Created by the process that starts workers, and called first in each of them."""

    def __init__(self) -> None:
        self._signals = signals_for_ranks()
        self._rank_pid = os.getpid()
        # The kernel's notion of a dead parent is the thread that started the worker.
        self._may_die_with_parent = threading.current_thread() is threading.main_thread()

    def __call__(self) -> None:
        if not hasattr(signal, "pthread_sigmask"):
            return
        for number in self._signals:
            signal.signal(number, _leave_to_rank)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        if self._may_die_with_parent and os.getppid() == self._rank_pid:
            with contextlib.suppress(OSError):  # torch's own watchdog then takes some seconds
                libc.die_with_parent()


def _leave_to_rank(number: int, frame: object) -> None:
    """A handler, and not "ignored": that the programs which a dataset starts would inherit."""
