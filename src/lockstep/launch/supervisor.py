"""Runs a job on one host: starts the ranks, passes on their output, ends them together, and reports failures.

`lockstep run` calls `launch_job`. A `Supervisor` runs the attempts of one job; local_workers.py runs one attempt.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from lockstep import env
from lockstep.launch.config import LaunchConfig, resolve_nproc
from lockstep.launch.environment import AttemptEnvironment, new_job_id
from lockstep.launch.free_port import find_free_port
from lockstep.launch.local_workers import LocalWorkers, Outcome, announce_restart, end_without_reader
from lockstep.launch.logs import LogFolder
from lockstep.launch.process import start_reaper
from lockstep.launch.reaper import Reaper
from lockstep.launch.root_cause import RankFailure, format_summary
from lockstep.launch.screen import say
from lockstep.launch.signals import SignalWatch
from lockstep.rank_status import EXIT_STOPPED, find_unjoined
from lockstep.secret import token_for_ranks

__all__ = ["Supervisor", "launch_job"]


def launch_job(config: LaunchConfig) -> int:
    """Run one job on this host and wait for its end. Local.

    While it runs, SIGINT, SIGTERM and SIGHUP are passed on to the ranks (if called from the main thread).

    Returns:
        The exit code: 0 if every rank exited with 0; `EXIT_STOPPED` if they were told to stop and said so; else that of
            the rank that failed first (128 + signal if one killed it); 128 + signal if this process was told to end.

    Raises:
        LaunchError: the job cannot be started with these options; nothing has been started.
    """
    return Supervisor(config).run()


class Supervisor:
    """Runs one job: attempts until one succeeds or no restarts are left.

    Raises:
        LaunchError: an option is invalid, or there is nothing to run.
        SetupError: an environment variable is invalid.
    """

    def __init__(self, config: LaunchConfig) -> None:
        config.check()
        self._config = config
        self._variables = dict(config.environment) if config.environment is not None else env.snapshot()
        env.check(self._variables)
        self._num_ranks = resolve_nproc(config.nproc, self._variables)
        self._job = new_job_id()
        self._token = token_for_ranks(env.LOCKSTEP_TOKEN.get(self._variables))
        self._logs = LogFolder(config.log_dir) if config.log_dir is not None else None

    def run(self) -> int:
        """Run the job to its end; see `launch_job`."""
        with contextlib.ExitStack() as stack:
            if self._logs is not None:
                stack.callback(self._logs.close)
                self._logs.open(range(self._num_ranks))
            signals = stack.enter_context(SignalWatch())
            reaper = start_reaper(self._job, self._variables)
            stack.callback(reaper.dismiss)
            for restart_count in range(self._config.max_restarts + 1):
                outcome = self._run_attempt(restart_count, signals, reaper)
                if outcome.output_error is not None:
                    return end_without_reader(outcome.output_error)
                say(outcome.last_words)
                if outcome.is_stopped:
                    return EXIT_STOPPED
                if not outcome.failures:
                    return 0 if outcome.interrupted_by is None else 128 + outcome.interrupted_by
                # A user who interrupts a failing job does not want it restarted.
                if restart_count == self._config.max_restarts or outcome.interrupted_by is not None:
                    break
                first = outcome.failures[0]
                trace = first.report.traceback if first.report is not None else ""
                announce_restart(first.describe(), restart_count + 1, self._config, self._logs, trace)
            config = self._config
            if _is_explained(outcome.failures, config.explained_code):
                return outcome.failures[0].exit_code
            if config.on_failure is not None:
                config.on_failure(outcome.failures)
            else:
                say(format_summary(outcome.failures, self._num_ranks, config.log_dir, config.rehearsable))
            return outcome.failures[0].exit_code

    def _run_attempt(self, restart_count: int, signals: SignalWatch, reaper: Reaper) -> Outcome:
        config = self._config
        with LocalWorkers(config, self._job, signals, reaper, self._logs) as workers:
            environment = AttemptEnvironment(
                base=self._variables,
                job=self._job,
                folder=workers.folder,
                world_size=self._num_ranks,
                master_addr=config.master_addr,
                master_port=config.master_port if config.master_port is not None else find_free_port(),
                restart_count=restart_count,
                max_restarts=config.max_restarts,
                token=self._token,
                shows_errors=self._logs is None,  # a log is read by itself, and needs the rank's own errors
            )
            workers.start(environment)
            workers.attempt.wait()
            outcome = workers.end()
            if config.on_end is not None:
                config.on_end(workers.folder)
            if not outcome.failures and outcome.interrupted_by is None and config.warns_unjoined:
                self._warn_unjoined(workers.folder)
            return outcome

    def _warn_unjoined(self, folder: Path) -> None:
        """Warn if no rank joined a group: each rank may then have run the whole training."""
        count = self._num_ranks
        if not {"-h", "--help"}.isdisjoint(self._config.args):  # then a script only shows its options
            return
        if count > 1 and len(find_unjoined(folder, range(count))) == count:
            say(
                f"lockstep: {count} ranks ended and none joined a process group: each ran the whole script alone. To "
                "share the work call lockstep.init() (or dist.init_process_group()) in the script\n"
            )


def _is_explained(failures: list[RankFailure], code: int | None) -> bool:
    """Whether all independently failed ranks exited with `explained_code`, so that no summary is needed."""
    return code is not None and all(
        one.report is None and (one.ended.code == code or one.ended.stopped) for one in failures
    )
