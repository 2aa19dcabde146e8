"""The local workers: the ranks of one attempt on this host, from their start to the causes of their failures.

Used by jobs on one host (`supervisor.py`) and on several (`hosts/`). environment.py lists the variables that ranks get,
attempt.py describes how an attempt ends, root_cause.py finds the first failure.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch.attempt import Attempt
from lockstep.launch.attempt_folder import AttemptFolder
from lockstep.launch.command import BROKEN_PIPE_CODE
from lockstep.launch.config import LaunchConfig
from lockstep.launch.environment import AttemptEnvironment
from lockstep.launch.logs import LogFolder
from lockstep.launch.output import Relay
from lockstep.launch.positions import RankStatus, describe_interrupt, describe_statuses, format_table, look
from lockstep.launch.process import RankCommand, launch_errors, worker_command_line
from lockstep.launch.reaper import Reaper
from lockstep.launch.report import ErrorReport, read_reports
from lockstep.launch.root_cause import RankFailure, find_first_failure, format_last_words
from lockstep.launch.screen import say
from lockstep.launch.signals import SignalWatch
from lockstep.launch.stacks import dump_stacks
from lockstep.rank_status import EXIT_STOPPED, make_status_files

__all__ = ["LocalWorkers", "Outcome", "announce_restart", "end_without_reader"]

_DRAIN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended on this host.

    Attributes:
        failures: the failures of its ranks, the first one first; empty if something else ended the attempt.
        last_words: errors that ranks raised after they were told to end, formatted by `format_last_words`.
        interrupted_by: the signal that the launcher got at any time during the attempt, or None.
        is_stopped: whether ranks were told to stop, and ended so that they may be restarted; see `EXIT_STOPPED`.
        output_error: why the ranks' output could not be passed on, if that is what ended it.
    """

    failures: list[RankFailure]
    interrupted_by: int | None = None
    output_error: OSError | None = None
    last_words: str = ""
    is_stopped: bool = False


class LocalWorkers:
    """The ranks of one attempt on this host. Used once: `start`, `attempt.wait`, `end`, and in any case `close`.

    Args:
        config: the options of the job.
        job: the job's id.
        signals: the signals that the launcher receives meanwhile.
        reaper: ends the ranks if this process cannot.
        logs: the files of their output; None for this process's own stdout and stderr.

    Attributes:
        attempt: the processes of the ranks.
        folder: the attempt's private folder.
        reports: the error reports of ranks that failed; complete when `end` has returned.
        statuses: where every rank was at the first failure.
    """

    def __init__(
        self, config: LaunchConfig, job: str, signals: SignalWatch, reaper: Reaper, logs: LogFolder | None
    ) -> None:
        self._config = config
        self._signals = signals
        self._logs = logs
        with contextlib.ExitStack() as stack, launch_errors("cannot watch ranks"):
            folder = AttemptFolder(reaper.watch_folder)
            stack.callback(folder.remove)
            self.folder: Path = folder.path
            self._relay = Relay(all_bars=config.all_bars) if config.prefix and logs is None else None
            if self._relay is not None:
                stack.callback(self._relay.close)
            self.attempt = Attempt(
                folder,
                reaper,
                job=job,
                grace_s=config.grace_s,
                settle_s=config.settle_s,
                stop_grace_s=config.stop_grace_s,
                on_failure=self._on_failure,
            )
            self.reports: dict[int, ErrorReport] = {}
            self.statuses: dict[int, RankStatus] = {}
            self._processes = contextlib.ExitStack()
            self._processes.callback(self.attempt.close)
            stack.enter_context(self._processes)
            self.attempt.watch(signals.fileno(), self._on_signals)
            if self._relay is not None:
                self.attempt.watch(self._relay.broken_fd, self._on_breakage)
            self._stack = stack.pop_all()

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, environment: AttemptEnvironment) -> None:
        """Start all ranks.

        Raises:
            LaunchError: not all can be started; `close` ends the others.
        """
        self._stack.callback(_close_all, make_status_files(self.folder, environment.ranks))
        with launch_errors(f"cannot start {len(environment.ranks)} ranks"):
            self.attempt.start(self._commands(environment))
            if self._relay is not None:
                self._relay.close_writers()

    def end(self) -> Outcome:
        """End the remaining ranks, pass on the rest of their output, and return how the attempt ended."""
        attempt, relay = self.attempt, self._relay
        self._processes.close()
        self.reports = reports = read_reports(self.folder, attempt.pids)
        failures = find_first_failure(attempt.exits, reports, attempt.failed_ranks, self.statuses)
        last_words = self.format_last_words() if attempt.is_cut_short and self._logs is None else ""
        failures = [] if attempt.is_cut_short else failures
        interrupted_by = attempt.interrupted_by
        if relay is not None:
            may_wait = not failures and interrupted_by is None
            interrupted_by = self._drain(relay, may_wait) or interrupted_by
            # If the reader of the output is gone, that has ended the job by SIGTERM, unless it had ended before.
            if relay.error is not None and not failures and interrupted_by in (None, signal.SIGTERM):
                return Outcome([], output_error=relay.error)
        codes = {ended.code for ended in attempt.exits.values()}
        is_stopped = codes <= {0, EXIT_STOPPED} and EXIT_STOPPED in codes
        return Outcome(failures, interrupted_by, last_words=last_words, is_stopped=is_stopped)

    def format_last_words(self) -> str:
        """The ranks' own errors in a job that none of them ended; empty if there are none. Call it after `end`."""
        attempt = self.attempt
        return format_last_words(find_first_failure(attempt.exits, self.reports, attempt.failed_ranks))

    def close(self) -> None:
        """End the remaining ranks and release everything. May be called twice."""
        self._stack.close()

    def _commands(self, environment: AttemptEnvironment) -> Sequence[RankCommand]:
        config = self._config
        target = ("-m", config.target) if config.is_module else (config.target,)
        commands = []
        for rank in environment.ranks:
            if self._relay is not None:
                stdout, stderr = self._relay.attach(rank)
            elif self._logs is not None:
                stdout = stderr = self._logs.fd(rank)
            else:
                stdout, stderr = None, None
            argv = (*worker_command_line(), *target, *config.args_of(rank - environment.first_rank))
            stdin = None if rank == 0 and _may_read_stdin() else subprocess.DEVNULL
            commands.append(
                RankCommand(rank, argv, environment.of_rank(rank), stdin, stdout, stderr, forks=config.forks)
            )
        return commands

    def _on_signals(self) -> None:
        for number in self._signals.read():
            if number == signal.SIGUSR1:
                say(format_table(look(self.folder, self.attempt.pids)))
                continue
            if number != signal.SIGTSTP:
                if self.attempt.is_undisturbed:
                    self._print_interrupt(number)
                self.attempt.interrupt(number)
                continue
            # The ranks are not in the terminal's session, so Ctrl-Z reaches only us.
            self.attempt.pause()
            os.kill(os.getpid(), signal.SIGSTOP)
            self.attempt.resume()

    def _print_interrupt(self, number: int) -> None:
        """Print in one sentence which signal came, how to end the ranks sooner, and where they were."""
        behind_key = "\n" if number == signal.SIGINT and os.isatty(2) else ""  # the terminal's ^C
        statuses = describe_statuses(look(self.folder, self.attempt.pids))
        say(behind_key + describe_interrupt(number, self.attempt.interrupt_grace_s, statuses))

    def _on_failure(self) -> None:
        self.statuses = look(self.folder, self.attempt.pids)
        if self._config.stacks_on_timeout:
            reports = read_reports(self.folder, self.attempt.pids)
            if any(report.is_timeout for report in reports.values()):
                # Ranks that have raised show the place in their tracebacks; their stacks are gone.
                waiting = {rank: pid for rank, pid in self.attempt.alive_pids.items() if rank not in reports}
                say(dump_stacks(waiting))

    def _on_breakage(self) -> None:
        assert self._relay is not None
        os.eventfd_read(self._relay.broken_fd)
        # Ctrl-C in `lockstep run … | tee log` ends tee as well: the ranks then have their grace period, without a
        # reader.
        self._on_signals()
        if self.attempt.is_undisturbed:
            self.attempt.interrupt(signal.SIGTERM)

    def _drain(self, relay: Relay, may_wait: bool) -> int | None:
        """Let the relay pass on the rest of the output.

        Waits for a slow reader (a pager) after success, as `python | less` does, and for a few seconds otherwise. A
        signal ends the wait.

        Returns:
            The signal that ended the wait, or None.
        """
        relay.finish()
        deadline = None if may_wait else time.monotonic() + _DRAIN_TIMEOUT_S
        poll = select.poll()
        poll.register(relay.done_fd, select.POLLIN)
        poll.register(self._signals.fileno(), select.POLLIN)
        while True:
            left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            ready = {fd for fd, _ in poll.poll(left_ms)}
            if relay.done_fd in ready or not ready:
                return None
            for number in self._signals.read():
                if number == signal.SIGUSR1:
                    continue
                if number != signal.SIGTSTP:
                    return number
                os.kill(os.getpid(), signal.SIGSTOP)


def announce_restart(why: str, restart: int, config: LaunchConfig, logs: LogFolder | None, trace: str) -> None:
    """Announce that all ranks are being restarted.

    Args:
        why: the reason, a clause.
        restart: number of this restart, from 1.
        config: has the maximum number of restarts.
        logs: where the ranks' output goes; None for the screen.
        trace: the traceback of the failure, for the screen; empty for none.
    """
    text = f"lockstep: {why}; starting all ranks again (restart {restart} of {config.max_restarts})\n"
    if logs is not None:
        logs.write(text)
        trace = ""
    say(text + trace)


def end_without_reader(error: OSError) -> int:
    """The exit code of a job whose output could not be passed on; prints the reason on stderr."""
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE_CODE
    say(f"lockstep: error: cannot pass on the output of the ranks: {error}; the job was stopped\n")
    return 1


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _may_read_stdin() -> bool:
    """Whether a rank may read our stdin: not from a terminal that currently belongs to another job.

    A rank is in a separate session, so the terminal itself would not stop it.
    """
    try:
        return not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
