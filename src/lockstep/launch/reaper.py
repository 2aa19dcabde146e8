"""Ends every process of a job; also the small program that does so when the launcher cannot.

A rank leads a new session, so all processes that it starts (DataLoader workers, subprocesses, their children) are in
that session, in any process group and with any signals ignored. A process that left the session with setsid still has
the job's id in its environment. `sweep` kills both.

The launcher sweeps when a job ends. In case the launcher is killed with -9, it starts this file as a program in a
separate session, which holds the read end of a pipe: the launcher writes each session and folder of the job into the
pipe, and when the pipe or the launcher ends, the reaper sweeps and removes the folders. When a job has ended, the
launcher kills the reaper.

It is started by path as `python -I -S reaper.py`, and not forked, because a launch from Python may come from a process
with threads and gigabytes of memory, and because a `pkill -9 -f "lockstep run"` must not match it. So it only imports a
few modules of the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterable

__all__ = ["Reaper", "sweep"]

# The only name of env.py that is repeated: this file must run without the package.
_JOB_VARIABLE = b"LOCKSTEP_JOB="


def _session_of(pid: int) -> int | None:
    """The session of a process; None if it has ended, even if not reaped yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name is in parentheses and may contain anything, even parentheses.
            state, _parent, _group, session = file.read().rpartition(b")")[2].split()[:4]
    except (OSError, ValueError):
        return None
    return None if state in (b"Z", b"X") else int(session)


def _carries(pid: int, job: str) -> bool:
    """Whether the process was started inside `job`, according to its environment."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return False
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return False
    for variable in variables:
        if variable.startswith(_JOB_VARIABLE):
            return job.encode() in variable[len(_JOB_VARIABLE) :].split(b":")
    return False


def _belongs(pid: int, sessions: Collection[int], job: str | None) -> bool:
    session = _session_of(pid)
    if session is None or pid == os.getpid():
        return False
    return session in sessions or (job is not None and _carries(pid, job))


def _strike(pid: int, sessions: Collection[int], job: str | None) -> int | None:
    """Kill the process if it belongs to the job; returns its pidfd, or None if there was nothing to do.

    Checking twice avoids a race in which the pid is reused: once the pidfd is open, it refers to the process that was
    checked the second time.
    """
    if not _belongs(pid, sessions, job):
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        if _belongs(pid, sessions, job):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return pidfd
    except OSError:
        pass  # it ended by itself, or runs as another user: nothing left to do
    os.close(pidfd)
    return None


def _wait_for_exits(pidfds: Iterable[int], deadline: float) -> None:
    poll = select.poll()
    waiting = set(pidfds)
    for pidfd in waiting:
        poll.register(pidfd, select.POLLIN)
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left_s * 1000):
            poll.unregister(pidfd)
            waiting.discard(pidfd)


def sweep(sessions: Collection[int], job: str | None, timeout_s: float = 5.0) -> bool:
    """Kill every process of these sessions and of this job, until there is none.

    Local. Repeats until a pass over /proc finds none, so that the next pass finds a process that was being started.

    Args:
        sessions: session ids, which are the pids of the ranks.
        job: the job's id, to find processes that left their session too; None leaves those running.
        timeout_s: seconds to wait for killed processes to end.

    Returns:
        True if none is left; False if the time was up first (a process in uninterruptible sleep).
    """
    deadline = time.monotonic() + timeout_s
    while True:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        pidfds = [pidfd for pid in pids if (pidfd := _strike(pid, sessions, job)) is not None]
        if not pidfds:
            return True
        try:
            _wait_for_exits(pidfds, deadline)
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
        if time.monotonic() >= deadline:
            return False


class Reaper:
    """The launcher's handle on its reaper process.

    Args:
        job: the job's id, as in the ranks' environment.
        environment: the environment of the reaper; must not contain the id of any job, or a sweep would find it.
    """

    def __init__(self, job: str, environment: dict[str, str]) -> None:
        # Imported here, because the reaper itself does not need it, and starts faster without.
        import subprocess

        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), job],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env=environment,
            start_new_session=True,
        )

    def watch_session(self, session: int) -> None:
        """Let the reaper kill the session if this process dies."""
        self._send(f"session {session}")

    def watch_folder(self, folder: str) -> None:
        """Let the reaper remove the folder if this process dies."""
        self._send(f"folder {folder}")

    def _send(self, record: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(os.fsencode(record) + b"\0")
        except BrokenPipeError:
            # The reaper was killed. The launcher still ends the job, and ranks have a parent death signal.
            return

    def dismiss(self) -> None:
        """End the reaper, because the job has ended and was swept."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def _read_records(launcher: int) -> list[str]:
    """The records that the launcher wrote into the pipe, once it has ended.

    The pipe alone would be enough if no other process held its write end, but one forked by the user's code may. The
    launcher's pidfd decides. This is the only wait without a deadline: the reaper lives as long as its launcher.
    """
    poll = select.poll()
    poll.register(0, select.POLLIN)
    try:
        pidfd = os.pidfd_open(launcher)
    except OSError:
        pidfd = -1
    # If our parent is another process by now, the pid may have been reused.
    gone = pidfd < 0 or os.getppid() != launcher
    if not gone:
        poll.register(pidfd, select.POLLIN)
    received = b""
    while True:
        ready = {fd for fd, _ in poll.poll(0 if gone else None)}
        if 0 in ready:
            text = os.read(0, 65536)
            if not text:
                break
            received += text
        elif gone or pidfd in ready:
            break
    return [os.fsdecode(record) for record in received.split(b"\0")[:-1]]


def _main(launcher: int, job: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    records = [record.partition(" ") for record in _read_records(launcher)]
    sweep({int(value) for kind, _, value in records if kind == "session"}, job)
    import shutil

    for kind, _, value in records:
        if kind == "folder":
            shutil.rmtree(value, ignore_errors=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
