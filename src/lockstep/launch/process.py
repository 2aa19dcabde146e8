"""The process of one rank: started in a separate session, watched through a pidfd, signalled.

A signal that asks a rank to end is sent to the rank only, as by `docker stop` and systemd's KillMode=mixed: it may need
the processes that it has started, such as the workers of a DataLoader, to finish its step and save. Signals that a
terminal would send, and those that cannot be caught, go to its whole process group.

The launcher reads how a rank exited, but does not reap it until the whole attempt ends. Until then its pid, which is
also the id of its process group and session, cannot be reused, so a signal to the group never reaches another process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import LaunchError
from lockstep.launch.environment import reaper_environment
from lockstep.launch.reaper import Reaper
from lockstep.rank_status import EXIT_STOPPED

if TYPE_CHECKING:
    from lockstep.launch.forked import ForkedProcess

__all__ = ["RankCommand", "RankExit", "RankProcess", "launch_errors", "start_reaper", "worker_command_line"]

# Another part of the program reaped the process (it ignores SIGCHLD, or waits for any child): its exit code is lost.
_UNKNOWN_CODE = 255
_REAP_TIMEOUT_S = 2.0
_LIMITS = {errno.EMFILE: "open files (ulimit -n)", errno.EAGAIN: "processes (ulimit -u, or the container's)"}
_FOR_RANK_ALONE = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))


def worker_command_line() -> tuple[str, ...]:
    """The beginning of the command line that starts a rank by worker.py; the target follows.

    Interpreter options (-W, -X, -O, …) are passed on, as by multiprocessing to its children.
    """
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return (sys.executable, *options, os.path.abspath(Path(__file__).with_name("worker.py")))


def start_reaper(job: str, variables: Mapping[str, str]) -> Reaper:
    """Start the process that ends the job if this one cannot.

    Args:
        job: the job's id.
        variables: the environment of the job.

    Raises:
        LaunchError: the process cannot be started.
    """
    with launch_errors("cannot start another process"):
        return Reaper(job, reaper_environment(variables))


@contextlib.contextmanager
def launch_errors(what: str) -> Iterator[None]:
    """Turn errors of system calls in the block into a LaunchError, naming the limit that may be raised."""
    try:
        yield
    except OSError as error:
        limit = _LIMITS.get(error.errno or 0)
        raise LaunchError(f"{what}: {error}" + (f"; raise the limit on {limit}" if limit else "")) from error


@dataclass(frozen=True)
class RankCommand:
    """How to start one rank.

    Attributes:
        rank: global rank.
        argv: program and arguments.
        environment: all environment variables.
        stdin: input: a file descriptor, `subprocess.DEVNULL`, or None to inherit the launcher's.
        stdout: output: a file descriptor, or None to inherit.
        stderr: error output: a file descriptor, or None to inherit.
        pass_fds: file descriptors that it inherits under the same numbers.
        forks: `argv` starts worker.py, and this process is forked instead; see `forked.py`.
    """

    rank: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    stdin: int | None = subprocess.DEVNULL
    stdout: int | None = None
    stderr: int | None = None
    pass_fds: tuple[int, ...] = ()
    forks: bool = False


@dataclass(frozen=True)
class RankExit:
    """How one rank ended.

    Attributes:
        rank: global rank.
        pid: pid of its process.
        code: exit code, 128 + signal number if a signal killed it.
        signal: number of that signal, or None.
        time: when the launcher saw the exit, in seconds since the epoch.
        stopped: whether the launcher had already told it to stop.
        host: the host on which it ran; empty for this one.
        is_missed: whether it never joined the group of all ranks, while another waits in vain to join it.
    """

    rank: int
    pid: int
    code: int
    signal: int | None
    time: float
    stopped: bool
    host: str = ""
    is_missed: bool = False

    @property
    def is_good(self) -> bool:
        """Whether the rank has ended as intended: done, or told to stop and ready to be restarted."""
        return self.code in (0, EXIT_STOPPED) and not self.is_missed


@contextlib.contextmanager
def _sigint_held_back() -> Iterator[None]:
    """Block SIGINT: a process started meanwhile inherits that, and receives an early SIGINT when it unblocks it.

    So a Ctrl-C between the start of the interpreter and the bootstrap's own handling is not lost, and does not cause a
    traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(command: RankCommand) -> subprocess.Popen[bytes] | ForkedProcess:
    if command.forks:
        from lockstep.launch.forked import ForkedProcess

        arguments = [*command.argv[len(worker_command_line()) :]]
        return ForkedProcess(arguments, command.environment, (command.stdin, command.stdout, command.stderr))
    return subprocess.Popen(
        command.argv,
        env=command.environment,
        stdin=command.stdin,
        stdout=command.stdout,
        stderr=command.stderr,
        pass_fds=command.pass_fds,
        # A session rather than just a group: reading the terminal stays allowed, as job control only concerns the
        # terminal's own session.
        start_new_session=True,
    )


class RankProcess:
    """A running rank, leader of a new session and process group.

    Attributes:
        rank: global rank.
        pid: pid of the process, and id of its group and session.
        pidfd: readable once it has exited.
        was_signalled: whether this launcher has sent it a signal.

    Raises:
        LaunchError: the process cannot be started.
    """

    def __init__(self, command: RankCommand) -> None:
        self.rank = command.rank
        self.was_signalled = False
        with launch_errors(f"rank {command.rank}: cannot start {command.argv[0]}"), _sigint_held_back():
            self._popen = _start(command)
        self.pid = self._popen.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError as error:
            self._popen.kill()
            self._popen.wait()
            raise LaunchError(f"rank {self.rank}: cannot watch its process: {error} (needs Linux 5.4)") from error

    def send(self, number: int) -> None:
        """Send a signal to the rank; also to its whole process group, except for SIGTERM and the like."""
        self.was_signalled = self.was_signalled or number not in (signal.SIGCONT, signal.SIGSTOP)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.kill if number in _FOR_RANK_ALONE else os.killpg)(self.pid, number)

    def poll(self) -> RankExit | None:
        """How it ended, or None while it is running. Does not reap it."""
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return RankExit(self.rank, self.pid, _UNKNOWN_CODE, None, time.time(), self.was_signalled)
        if found is None:
            return None
        killed = found.si_code != os.CLD_EXITED
        number = found.si_status if killed else None
        code = 128 + found.si_status if killed else found.si_status
        return RankExit(self.rank, self.pid, code, number, time.time(), self.was_signalled)

    def reap(self) -> None:
        """Release the pid. Call it only after the last signal to the group."""
        # It has exited by now; the deadline is for one that not even SIGKILL could end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=_REAP_TIMEOUT_S)
        os.close(self.pidfd)
