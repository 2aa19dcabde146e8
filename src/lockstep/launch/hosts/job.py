"""A job on several hosts, as the launcher of one of them runs it."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import replace

from lockstep import env
from lockstep.errors import LaunchError, SetupError
from lockstep.launch.config import LaunchConfig, resolve_nproc
from lockstep.launch.environment import new_job_id
from lockstep.launch.hosts.agent import HostAgent, Interrupted, OutputLost
from lockstep.launch.hosts.clients import is_loopback
from lockstep.launch.hosts.job_store import JobStore, StoreLost
from lockstep.launch.hosts.options import HostsConfig
from lockstep.launch.hosts.rendezvous import HostRendezvous, JobClosed
from lockstep.launch.local_workers import LocalWorkers, end_without_reader
from lockstep.launch.logs import LogFolder
from lockstep.launch.process import start_reaper
from lockstep.launch.root_cause import RULE, format_summary
from lockstep.launch.screen import say
from lockstep.launch.signals import SignalWatch
from lockstep.rank_status import EXIT_STOPPED
from lockstep.secret import Secret, read_token_file, remarks_on

__all__ = ["launch_on_hosts"]

_DEPARTURES_WITHIN_S = 10.0
_POLL_S = 0.05


def launch_on_hosts(config: LaunchConfig, hosts: HostsConfig) -> int:
    """Run this host's part of a job on several hosts, and wait for the end of the job.

    Every host calls it. While it runs, SIGINT, SIGTERM and SIGHUP end this host's ranks, and the whole job if too few
    hosts remain.

    Args:
        config: what to run, and the ranks of this host.
        hosts: the hosts of the job, according to this host's options.

    Returns:
        The exit code, as from `launch_job` on one host; the same on all hosts that are there at the end.

    Raises:
        LaunchError: the job cannot be started with these options, or the hosts did not meet.
    """
    config.check()
    variables = config.environment if config.environment is not None else env.snapshot()
    hosts = replace(hosts, secret=_find_secret(hosts, variables))
    # torch's agent logs every step; this launcher reports what matters.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(SignalWatch())
        try:
            return _Job(config, hosts, signals, stack).run()
        except Interrupted as interrupted:
            return 128 + interrupted.number
        except OutputLost as lost:
            return end_without_reader(lost.error)
        except StoreLost as lost:
            say(f"{RULE}\nlockstep: {lost}; without it no host can continue\n{RULE}\n")
            return 1


def _find_secret(hosts: HostsConfig, variables: Mapping[str, str]) -> Secret:
    """The secret of the job: from the token file, else from LOCKSTEP_TOKEN, else none.

    Raises:
        LaunchError: the file, or the variable if set, contains no valid token.
    """
    token: str | None
    try:
        if hosts.token_file is None:
            token = env.LOCKSTEP_TOKEN.get(variables)
            remarks = remarks_on(token)
        else:
            token, remarks = read_token_file(hosts.token_file)
    except SetupError as error:
        raise LaunchError(str(error) if hosts.token_file is None else f"--rdzv-conf has {error}") from None
    for remark in remarks:
        say(f"lockstep: {remark}\n")
    return Secret(token)


class _Job:
    """The objects that one launcher needs during a job.

    Args:
        hosts: the hosts of the job, according to this host's options.
        signals: the signals that this launcher receives.
        stack: releases everything at the end.
    """

    def __init__(
        self, config: LaunchConfig, hosts: HostsConfig, signals: SignalWatch, stack: contextlib.ExitStack
    ) -> None:
        self._config = config
        self._signals = signals
        variables = dict(config.environment) if config.environment is not None else env.snapshot()
        num_ranks = resolve_nproc(config.nproc, variables)
        self._job = new_job_id()
        self._logs = LogFolder(config.log_dir) if config.log_dir is not None else None
        if self._logs is not None:
            stack.callback(self._logs.close)
        self._reaper = start_reaper(self._job, variables)
        stack.callback(self._reaper.dismiss)
        job_store = JobStore.open(hosts, self._wait)
        if job_store.is_holder and not hosts.secret.is_given and not is_loopback(hosts.address):
            say(
                f"lockstep: this job has no token, so anyone who reaches {hosts.endpoint} can join or end it; "
                "--rdzv-conf token_file=PATH gives it one (docs/security.md)\n"
            )
        self._rendezvous = HostRendezvous(hosts, job_store, num_ranks, config.max_restarts, self._wait)
        stack.callback(self._rendezvous.shutdown)
        self._agent = HostAgent(
            config, num_ranks, self._rendezvous, self._new_workers, self._wait, variables, self._job, self._logs
        )

    def run(self) -> int:
        """Run the job to its end; returns the exit code."""
        try:
            result = self._agent.run()
        except JobClosed as closed:
            code = closed.membership.exit_code
            if closed.is_cut_short and code == 0:
                # Not while ranks are running: no launcher closes the job then.
                say(f"lockstep: the job was ended from outside while ranks of this host were running ({closed})\n")
                code = 1
            elif code == 0 and not self._rendezvous.has_belonged:
                say(f"lockstep: the job was over before this host took part in it ({closed})\n")
                code = 1
            elif code != 0:
                say(f"lockstep: {closed}; the job ends here too\n")
        except Interrupted as interrupted:
            self._leave(interrupted.number)
            raise
        except OutputLost:
            self._leave(signal.SIGTERM)
            raise
        else:
            code = self._conclude(result.is_failed())
        self._publish_departure()
        return code

    def _new_workers(self) -> LocalWorkers:
        return LocalWorkers(self._config, self._job, self._signals, self._reaper, self._logs)

    def _wait(self, seconds: float) -> None:
        """Wait, while there are no ranks; raises if this launcher is told to end."""
        poll = select.poll()
        poll.register(self._signals.fileno(), select.POLLIN)
        poll.poll(seconds * 1000)
        for number in self._signals.read():
            if number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)
            elif number != signal.SIGUSR1:
                raise Interrupted(number)

    def _conclude(self, is_failed: bool) -> int:
        """Report how the last round ended, in the same way on all hosts."""
        if not is_failed:
            code = EXIT_STOPPED if self._agent.is_stopped else 0
            self._rendezvous.close("the ranks were told to stop" if code else "the job is done", code)
            return code
        failures, absent = self._agent.failures, self._agent.absent
        num_ranks = sum(host.num_ranks for host in self._rendezvous.members)
        if absent:
            names = ", ".join(map(str, absent))
            verb, needed = "was" if len(absent) == 1 else "were", self._rendezvous.membership.terms.min_nodes
            say(f"{RULE}\nlockstep: {names} {verb} lost, and the job needs {needed} hosts\n")
        if absent and all(one.ended.stopped and one.report is None for one in failures):
            say(f"{RULE}\n")
        elif failures:
            config = self._config
            say(format_summary(failures, num_ranks, config.log_dir, config.rehearsable, self._agent.ranks))
        code = 1 if absent or not failures else failures[0].exit_code
        self._rendezvous.close(f"{self._rendezvous.host} has ended the job after a failure", code)
        return code

    def _leave(self, number: int) -> None:
        """Publish the end of the job, if the store is still there."""
        text = f"{self._rendezvous.host} was told to end ({signal.Signals(number).name})"
        with contextlib.suppress(StoreLost):
            self._rendezvous.leave(text, 128 + number)
            self._publish_departure()

    def _publish_departure(self) -> None:
        """Let the launcher that holds the store end last, so that all others have read the end of the job."""
        deadline_s = time.monotonic() + _DEPARTURES_WITHIN_S
        with contextlib.suppress(StoreLost):
            self._rendezvous.publish_departure()
            while (
                self._rendezvous.job_store.is_holder and time.monotonic() < deadline_s and self._rendezvous.is_needed()
            ):
                time.sleep(_POLL_S)
