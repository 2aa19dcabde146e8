"""The process from which test workers are forked.

Importing torch takes seconds and forking a process that has imported it takes milliseconds, so one process, the fork
server, imports everything and runs nothing; workers are forked from it when a world needs more of them and when one
must be replaced. The fork server also reaps its children, reports how they ended, and cleans up when the caller has
ended: it kills the workers and removes the calls' folder, even if the caller was killed by SIGKILL.

Messages are pickled tuples over a pipe that only the two processes have:

    caller to server     ("fork",) and then a descriptor     fork a worker that serves it
                         ("signal", pid, signum)             to a worker, if it still lives
    server to caller     ("ready", folder)                   once, after the imports
                         ("forked", pid)
                         ("died", pid, exit_code)            negative: killed by that signal
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import os
import select
import shutil
import signal
import sys
import tempfile
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection

from lockstep import libc
from lockstep.testing import worker

__all__ = ["main"]

_PRELOADED = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",  # the first optimizer and the first DDP of a process import it
    "lockstep.comm.backend",
    "lockstep.world",
)

# How often an idle fork server checks whether its caller is still alive. It notices the end of the pipe at once, except
# while some child of the caller still has a copy.
_CALLER_CHECK_S = 1.0


def main(control_descriptor: int) -> None:
    """Import, report ready, serve the caller until it has ended, leave nothing behind.

    Args:
        control_descriptor: the fork server's end of the pipe to the caller.
    """
    caller = os.getppid()
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in a worker then do not touch the shared pages
    control = Connection(control_descriptor)
    folder = tempfile.mkdtemp(prefix="lockstep-testing-")
    server = _ForkServer(control, caller)
    try:
        control.send(("ready", folder))
        server.serve()
    except (EOFError, OSError):
        pass
    finally:
        if os.getpid() == server.pid:
            server.kill_all()
            shutil.rmtree(folder, ignore_errors=True)


class _ForkServer:
    """Forks, signals and reaps workers, as ordered by the caller."""

    def __init__(self, control: Connection, caller: int) -> None:
        self.pid = os.getpid()
        self._control = control
        self._caller = caller
        self._children: set[int] = set()
        # SIGCHLD becomes a byte in this pipe, so that one select waits for orders and deaths.
        self._wakeup, wakeup_end = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(wakeup_end, False)
        self._wakeup_end = wakeup_end
        signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)

    def serve(self) -> None:
        """Serve until the caller closes its end or dies."""
        while os.getppid() == self._caller:
            ready, _, _ = select.select([self._control.fileno(), self._wakeup], [], [], _CALLER_CHECK_S)
            if self._wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
                self._reap()
            if self._control.fileno() in ready:
                self._execute(self._control.recv())

    def kill_all(self) -> None:
        """SIGKILL every worker and wait for its end."""
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)
        self._children.clear()

    def _execute(self, order: tuple[object, ...]) -> None:
        match order:
            case ("fork",):
                self._fork(reduction.recv_handle(self._control))
            case ("signal", int(pid), int(signum)):
                # Only for children that were not reaped yet: their pids cannot have been reused.
                if pid in self._children:
                    os.kill(pid, signum)
            case _:
                raise AssertionError(f"no such order: {order!r}")

    def _fork(self, descriptor: int) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_worker(descriptor)
        os.close(descriptor)
        self._children.add(pid)
        self._control.send(("forked", pid))

    def _reap(self) -> None:
        for pid in list(self._children):
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped == pid:
                self._children.discard(pid)
                self._control.send(("died", pid, os.waitstatus_to_exitcode(status)))

    def _become_worker(self, descriptor: int) -> None:
        """In the child: serve calls, then exit without the fork server's clean-up."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._wakeup)
            os.close(self._wakeup_end)
            self._control.close()
            libc.die_with_parent()
            if os.getppid() != self.pid:  # the fork server died before the line above
                os._exit(1)
            for stream in (sys.stdout, sys.stderr):
                # Each line is a single write, even with PYTHONUNBUFFERED, so lines of ranks are not interleaved.
                if isinstance(stream, io.TextIOWrapper):
                    stream.reconfigure(line_buffering=True, write_through=False)
            faulthandler.enable(file=2)
            # Chained to the default action, which ends the process once the dump is written.
            faulthandler.register(worker.DUMP_SIGNAL, file=2, all_threads=True, chain=True)
            worker.serve(Connection(descriptor))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
