"""A job on one host: start the ranks, pass on what they say, end them together, say what went wrong.

`launch_job` is what `lockstep run` calls. A `Supervisor` runs the attempts of one job; which
variables the ranks get is listed in environment.py, how an attempt ends in attempt.py, how
the first failure is found in verdict.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep import env
from lockstep.errors import LaunchError
from lockstep.launch.attempt import Attempt
from lockstep.launch.config import LaunchConfig, resolve_nproc
from lockstep.launch.environment import AttemptEnvironment, new_job_id
from lockstep.launch.guardian import Guardian
from lockstep.launch.output import Relay, say, write_all
from lockstep.launch.process import RankCommand, start_guardian, worker_command_line
from lockstep.launch.rendezvous import Rendezvous, find_free_port
from lockstep.launch.report import read_reports
from lockstep.launch.signals import SignalWatch
from lockstep.launch.verdict import Failure, find_first_failure, format_verdict

__all__ = ["Supervisor", "launch_job"]

# What a program exits with whose reader went away.
_BROKEN_PIPE_CODE = 128 + signal.SIGPIPE
_DRAIN_TIMEOUT_S = 5.0


def launch_job(config: LaunchConfig) -> int:
    """Run one job on this host and wait for its end. Local.

    While it runs, SIGINT, SIGTERM and SIGHUP go to the ranks (if called from the main thread).

    Returns:
        The exit code: 0 if every rank exited with 0; else that of the rank that failed first (128 + signal if
        one killed it); 128 + signal if this process was told to end.

    Raises:
        LaunchError: the job cannot be started as asked; nothing has been started.
    """
    return Supervisor(config).run()


@dataclass(frozen=True)
class _Outcome:
    """How one attempt ended.

    Attributes:
        failures: of its ranks, the first one first; empty if none failed before anything else happened.
        interrupted_by: a signal that somebody sent to the launcher, at whatever moment, or None.
        output_error: why the ranks' output could not be passed on, if that is what ended it.
    """

    failures: list[Failure]
    interrupted_by: int | None = None
    output_error: OSError | None = None


class Supervisor:
    """Runs one job: attempts until one succeeds or restarts are used up.

    Args:
        config: what to run.

    Raises:
        LaunchError: an option makes no sense, or there is nothing to run.
    """

    def __init__(self, config: LaunchConfig) -> None:
        config.check()
        self._config = config
        self._variables = dict(config.environment) if config.environment is not None else env.snapshot()
        self._num_ranks = resolve_nproc(config.nproc, self._variables)
        self._job = new_job_id()
        self._log_fds: list[int] = []

    def run(self) -> int:
        """Run the job to its end; see `launch_job`."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_logs)
            self._open_logs()
            signals = stack.enter_context(SignalWatch())
            guardian = start_guardian(self._job, self._variables)
            stack.callback(guardian.dismiss)
            for restart_count in range(self._config.max_restarts + 1):
                outcome = self._run_attempt(restart_count, signals, guardian)
                if outcome.output_error is not None:
                    return self._end_without_reader(outcome.output_error)
                if not outcome.failures:
                    return 0 if outcome.interrupted_by is None else 128 + outcome.interrupted_by
                # Whoever interrupts a job that is failing does not want it to start again.
                if restart_count == self._config.max_restarts or outcome.interrupted_by is not None:
                    break
                self._announce_restart(outcome.failures[0], restart_count + 1)
            say(format_verdict(outcome.failures, self._num_ranks, self._config.log_dir))
            return outcome.failures[0].exit_code

    def _run_attempt(self, restart_count: int, signals: SignalWatch, guardian: Guardian) -> _Outcome:
        config = self._config
        with contextlib.ExitStack() as stack:
            rendezvous = Rendezvous()
            stack.callback(rendezvous.remove)
            guardian.watch_folder(str(rendezvous.folder))
            attempt = Attempt(rendezvous, guardian, job=self._job, grace_s=config.grace_s, settle_s=config.settle_s)
            relay = Relay() if config.prefix and config.log_dir is None else None
            if relay is not None:
                stack.callback(relay.close)
            with contextlib.ExitStack() as processes:
                processes.callback(attempt.close)
                attempt.watch(signals.fileno(), lambda: self._on_signals(signals, attempt))
                if relay is not None:
                    attempt.watch(relay.broken_fd, self._make_breakage_callback(relay, attempt))
                self._start(attempt, relay, rendezvous.folder, restart_count)
                attempt.wait()
            reports = read_reports(rendezvous.folder, attempt.pids)
            failures = [] if attempt.is_cut_short else find_first_failure(attempt.exits, reports, attempt.failed_ranks)
            interrupted_by = attempt.interrupted_by
            if relay is not None:
                may_wait = not failures and interrupted_by is None
                interrupted_by = self._drain(relay, signals, may_wait) or interrupted_by
                # A reader that went away has ended the job by SIGTERM, unless something else had ended it before.
                if relay.error is not None and not failures and interrupted_by in (None, signal.SIGTERM):
                    return _Outcome([], output_error=relay.error)
            return _Outcome(failures, interrupted_by)

    def _start(self, attempt: Attempt, relay: Relay | None, folder: Path, restart_count: int) -> None:
        try:
            attempt.start(self._commands(folder, restart_count, relay))
            if relay is not None:
                relay.close_writers()
        except OSError as error:  # Not enough file descriptors or memory for so many ranks.
            raise LaunchError(f"cannot start {self._num_ranks} ranks: {error}") from error

    def _commands(self, folder: Path, restart_count: int, relay: Relay | None) -> Sequence[RankCommand]:
        config = self._config
        port = config.master_port if config.master_port is not None else find_free_port()
        environment = AttemptEnvironment(
            base=self._variables,
            job=self._job,
            folder=folder,
            world_size=self._num_ranks,
            master_addr=config.master_addr,
            master_port=port,
            restart_count=restart_count,
            max_restarts=config.max_restarts,
        )
        target = ("-m", config.target) if config.is_module else (config.target,)
        commands = []
        for rank in range(self._num_ranks):
            if relay is not None:
                stdout, stderr = relay.attach(rank)
            elif self._log_fds:
                stdout = stderr = self._log_fds[rank]
            else:
                stdout, stderr = None, None
            argv = (*worker_command_line(), *target, *config.args)
            stdin = None if rank == 0 and _may_read_stdin() else subprocess.DEVNULL
            commands.append(RankCommand(rank, argv, environment.of_rank(rank), stdin, stdout, stderr))
        return commands

    def _on_signals(self, signals: SignalWatch, attempt: Attempt) -> None:
        for number in signals.read():
            if number != signal.SIGTSTP:
                attempt.interrupt(number)
                continue
            # The ranks are not in the terminal's session, so Ctrl-Z reaches only us.
            attempt.pause()
            os.kill(os.getpid(), signal.SIGSTOP)
            attempt.resume()

    def _make_breakage_callback(self, relay: Relay, attempt: Attempt) -> Callable[[], None]:
        def on_breakage() -> None:
            os.eventfd_read(relay.broken_fd)
            attempt.interrupt(signal.SIGTERM)

        return on_breakage

    def _drain(self, relay: Relay, signals: SignalWatch, may_wait: bool) -> int | None:
        """Let the relay pass on the rest.

        A reader that takes its time (a pager) is waited for after success, as `python | less` does, and
        for a few seconds after anything else. A signal ends the wait.

        Returns:
            The signal that ended the wait, or None.
        """
        relay.finish()
        deadline = None if may_wait else time.monotonic() + _DRAIN_TIMEOUT_S
        poll = select.poll()
        poll.register(relay.done_fd, select.POLLIN)
        poll.register(signals.fileno(), select.POLLIN)
        while True:
            left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            ready = {fd for fd, _ in poll.poll(left_ms)}
            if relay.done_fd in ready or not ready:
                return None
            for number in signals.read():
                if number != signal.SIGTSTP:
                    return number
                os.kill(os.getpid(), signal.SIGSTOP)

    def _announce_restart(self, failure: Failure, restart: int) -> None:
        text = (
            f"lockstep: {failure.describe()}; starting all ranks again "
            f"(restart {restart} of {self._config.max_restarts})\n"
        )
        say(text)
        for fd in self._log_fds:
            with contextlib.suppress(OSError):
                write_all(fd, text.encode("utf-8", "backslashreplace"))

    def _end_without_reader(self, error: OSError) -> int:
        if isinstance(error, BrokenPipeError):
            return _BROKEN_PIPE_CODE
        say(f"lockstep: error: cannot pass on the output of the ranks: {error}; the job was stopped\n")
        return 1

    def _open_logs(self) -> None:
        log_dir = self._config.log_dir
        if log_dir is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            os.makedirs(log_dir, exist_ok=True)
            for rank in range(self._num_ranks):
                self._log_fds.append(os.open(os.path.join(log_dir, f"rank{rank}.log"), flags, 0o666))
        except OSError as error:
            raise LaunchError(f"log_dir {log_dir!r} cannot be written: {error}; name another folder") from error
        say(f"lockstep: output goes to {os.path.join(log_dir, 'rank*.log')}, one file per rank\n")

    def _close_logs(self) -> None:
        for fd in self._log_fds:
            os.close(fd)
        self._log_fds.clear()


def _may_read_stdin() -> bool:
    """Whether a rank may read our stdin: not from a terminal that belongs to another job right now.

    A rank has a session of its own, so the terminal itself would not hold it back.
    """
    try:
        return not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
