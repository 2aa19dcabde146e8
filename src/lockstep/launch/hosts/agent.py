"""torch's elastic agent over the ranks of this host.

torch calls `_monitor_workers` repeatedly and acts on its result. Here the result is HEALTHY until all hosts of the
round agree on how the round ended, so that all of them do the same next:

all ranks of all hosts have exited with 0                      SUCCEEDED   the job is done
a rank of any host has failed                                  FAILED      another round, if there may be one; counted
a host left, was lost or came, and there are enough hosts      HEALTHY     another round; not counted
a host left or was lost, and there are too few                 FAILED, or the job is over if it was told to end
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource

from lockstep.launch.config import LaunchConfig
from lockstep.launch.environment import AttemptEnvironment
from lockstep.launch.hosts.job_store import StoreLost
from lockstep.launch.hosts.membership import Host
from lockstep.launch.hosts.rendezvous import HostRendezvous, JobClosed
from lockstep.launch.hosts.reports import HostReport, find_first_failure_of_all
from lockstep.launch.local_workers import LocalWorkers, Outcome, announce_restart
from lockstep.launch.logs import LogFolder
from lockstep.launch.root_cause import RankFailure
from lockstep.launch.screen import say
from lockstep.rank_status import EXIT_STOPPED

__all__ = ["HostAgent", "Interrupted", "OutputLost"]

_POLL_S = 0.1
# torch sleeps this long between two calls; ours wait by themselves, until something happens.
_TORCH_SLEEP_S = 0.001
# Seconds to wait for a silent host, in addition to those that hosts need to end their ranks.
_REPORT_PATIENCE_S = 15.0


class Interrupted(Exception):
    """This launcher was told to end.

    Attributes:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class OutputLost(Exception):
    """The ranks' output could not be passed on.

    Attributes:
        error: the error of the output.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class HostAgent(SimpleElasticAgent):
    """Starts, watches and ends the ranks of this host, in step with the other hosts.

    Args:
        config: the options of the job.
        num_ranks: number of ranks of this host.
        rendezvous: the rounds, agreed on with the other hosts.
        new_workers: creates the local workers of one round.
        rest: waits that many seconds while there are no ranks; raises when this launcher is told to end.
        variables: the environment that ranks start from.
        job: id of the processes that are started on this host.
        logs: the files of the ranks' output, or None.

    Attributes:
        failures: the failures of the last round, the first one first.
        absent: hosts whose loss ended the last round.
        ranks: the ranks of this host in the last round.
    """

    def __init__(
        self,
        config: LaunchConfig,
        num_ranks: int,
        rendezvous: HostRendezvous,
        new_workers: Callable[[], LocalWorkers],
        rest: Callable[[float], None],
        variables: Mapping[str, str],
        job: str,
        logs: LogFolder | None,
    ) -> None:
        spec = WorkerSpec(
            role=DEFAULT_ROLE,
            local_world_size=num_ranks,
            rdzv_handler=rendezvous,
            entrypoint=config.target,
            max_restarts=config.max_restarts,
            monitor_interval=_TORCH_SLEEP_S,
        )
        super().__init__(spec)
        self.failures: list[RankFailure] = []
        self.absent: list[Host] = []
        self.ranks: set[int] = set()
        self._config = config
        self._rendezvous_of_hosts = rendezvous
        self._new_workers = new_workers
        self._rest = rest
        self._variables = variables
        self._job = job
        self._logs = logs
        self._workers: LocalWorkers | None = None
        self._outcome: Outcome | None = None
        self._has_published_failure = False
        self._is_judged = False
        self._patience_ends_s: float | None = None

    # ---- what torch asks for -----------------------------------------------------------------------

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the ranks in order of the hosts; hosts may have different numbers of ranks."""
        sizes = [host.num_ranks for host in self._rendezvous_of_hosts.members]
        first, total = sum(sizes[:group_rank]), sum(sizes)
        return [Worker(local, first + local, first + local, total, total) for local in range(spec.local_world_size)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        rendezvous, first = self._rendezvous_of_hosts, worker_group.workers[0]
        self._workers, self._outcome, self._has_published_failure = self._new_workers(), None, False
        self.failures, self.absent, self._patience_ends_s = [], [], None
        self._is_judged, self.ranks = False, {worker.global_rank for worker in worker_group.workers}
        environment = AttemptEnvironment(
            base=self._variables,
            job=self._job,
            folder=self._workers.folder,
            world_size=first.world_size,
            master_addr=rendezvous.master[0],
            master_port=rendezvous.master[1],
            restart_count=rendezvous.number,
            max_restarts=self._config.max_restarts,
            first_rank=first.global_rank,
            local_world_size=len(worker_group.workers),
            node_rank=rendezvous.position,
            num_nodes=len(rendezvous.members),
            run_id=rendezvous.get_run_id(),
            shows_errors=self._logs is None,
            token=rendezvous.token_of_ranks(),
        )
        if self._logs is not None:
            self._logs.open(environment.ranks, has_begun=rendezvous.number > 0)
        self._workers.start(environment)
        return {rank - first.global_rank: pid for rank, pid in self._workers.attempt.pids.items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """The state of the round, according to the table of this module."""
        rendezvous = self._rendezvous_of_hosts
        try:
            if rendezvous.must_move():
                return self._regroup("the first rendezvous endpoint is back")
            return self._look_at_round(worker_group)
        except StoreLost as lost:
            rendezvous.move(lost)
            return self._regroup("the host of the rendezvous endpoint was lost")

    def _look_at_round(self, worker_group: WorkerGroup) -> RunResult:
        self._wait_for_own_ranks()
        self._check_signals()
        rendezvous = self._rendezvous_of_hosts
        membership = rendezvous.look()
        # In this order: a host publishes why it leaves before any rank can fail because of it.
        has_failed = self._share_failure()
        leave_reason = rendezvous.leave_reason()
        # The launcher that judged this round first may have ended the job already; all find the same root cause.
        if membership.closed is not None and (leave_reason is not None or not has_failed):
            is_cut_short = self._outcome is None
            self._stop_workers(worker_group)
            raise JobClosed(membership, is_cut_short)
        if leave_reason is not None:
            # A host that leaves too few hosts is about to end the job, and that is reported then.
            return self._regroup(leave_reason, is_said=self._are_enough(1))
        if has_failed:
            return self._judge(worker_group)
        missing = rendezvous.missing()
        if missing:
            return self._lose(worker_group, missing)
        if membership.waiting and membership.has_room:
            text = f"{', '.join(map(str, membership.waiting))} came"
            rendezvous.publish_leave_reason(text)
            return self._regroup(text)
        if self._has_succeeded():
            return self._result(worker_group, WorkerState.SUCCEEDED)
        return RunResult(WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:  # torch 2.6 says which
        workers, self._workers = self._workers, None
        if workers is None:
            return
        try:
            if self._outcome is None:
                workers.attempt.stop()
                workers.attempt.wait()
                workers.end()
            if not self._is_judged and self._logs is None:
                say(workers.format_last_words())
        finally:
            workers.close()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30, **_: Any) -> None:
        self._stop_workers(self.get_worker_group())

    def _exit_barrier(self) -> None:
        """Do nothing: a round that has succeeded has succeeded on all hosts."""

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        """Like torch's own, without the host's full name, for which torch queries a name server each time."""
        return Event(f"torchelastic.worker.status.{state}", source, metadata={"run_id": self._job})

    # ---- the parts of `_monitor_workers` -----------------------------------------------------------

    def _wait_for_own_ranks(self) -> None:
        """Wait for a moment, until the ranks of this host have exited; then publish how."""
        assert self._workers is not None
        if self._outcome is not None:
            self._rest(_POLL_S)
        elif self._workers.attempt.wait(_POLL_S):
            self._end_own_ranks()

    def _end_own_ranks(self) -> None:
        """Publish how the ranks of this host have exited, unless this launcher has ended them."""
        assert self._workers is not None
        workers = self._workers
        self._check_signals()
        self._outcome = workers.end()
        if self._outcome.output_error is not None:
            raise OutputLost(self._outcome.output_error)
        if self._outcome.interrupted_by is not None and not self._outcome.failures:
            raise Interrupted(self._outcome.interrupted_by)
        report = HostReport(workers.attempt.exits, workers.reports, workers.attempt.failed_ranks, workers.statuses)
        self._rendezvous_of_hosts.put(f"report/{self._rendezvous_of_hosts.host.key}", report.encode())

    def _check_signals(self) -> None:
        """If this launcher was told to end, publish that before the ranks have ended, and wait for them."""
        workers = self._workers
        if workers is None or workers.attempt.interrupted_by is None or not workers.attempt.is_cut_short:
            return
        number = workers.attempt.interrupted_by
        rendezvous = self._rendezvous_of_hosts
        rendezvous.leave(f"{rendezvous.host} was told to end ({signal.Signals(number).name})", 128 + number)
        workers.attempt.wait()
        raise Interrupted(number)

    def _share_failure(self) -> bool:
        """Publish a failure of this host, or end these ranks after one on another; returns whether there is one."""
        assert self._workers is not None
        rendezvous, attempt = self._rendezvous_of_hosts, self._workers.attempt
        if attempt.failed_ranks and not self._has_published_failure:
            self._has_published_failure = True
            rendezvous.put("failed", rendezvous.host.key)
        if rendezvous.get("failed") is None:
            return False
        attempt.settle()
        return True

    def _reports(self) -> list[HostReport | None]:
        """The reports of the round's hosts on how their ranks ended."""
        rendezvous = self._rendezvous_of_hosts
        texts = [rendezvous.get(f"report/{host.key}") for host in rendezvous.members]
        reports: list[HostReport | None] = []
        for text in texts:
            report = None
            with contextlib.suppress(ValueError):  # not written by a launcher of this job; the true author rewrites it
                report = None if text is None else HostReport.decode(text)
            reports.append(report)
        return reports

    @property
    def is_stopped(self) -> bool:
        """Whether ranks of the last round, on any host, were told to stop and may be started again."""
        exits = [ended for report in self._reports() if report is not None for ended in report.exits.values()]
        return any(ended.code == EXIT_STOPPED for ended in exits)

    def _has_succeeded(self) -> bool:
        """Whether all ranks of all hosts have ended by themselves without an error."""
        return self._outcome is not None and all(report and not report.has_failed for report in self._reports())

    def _judge(self, worker_group: WorkerGroup) -> RunResult:
        """Decide on a round with a failed rank, once all hosts have reported how theirs ended, or are gone."""
        rendezvous, workers = self._rendezvous_of_hosts, self._workers
        assert workers is not None
        reports = self._reports()
        silent = [host for host, report in zip(rendezvous.members, reports, strict=True) if report is None]
        if rendezvous.host in silent:
            return RunResult(WorkerState.HEALTHY)  # its own ranks are still being ended
        gone = [host for host in rendezvous.missing() if host in silent]
        if gone:
            return self._lose(worker_group, gone)
        if silent and self._is_patient():
            return RunResult(WorkerState.HEALTHY)
        return self._fail(worker_group)

    def _is_patient(self) -> bool:
        now_s = time.monotonic()
        if self._patience_ends_s is None:
            # Ranks may take the grace period twice: exiting by themselves, and when they are asked to stop.
            ending_s = self._config.settle_s + 2 * self._config.grace_s
            self._patience_ends_s = now_s + ending_s + _REPORT_PATIENCE_S
        return now_s < self._patience_ends_s

    def _lose(self, worker_group: WorkerGroup, gone: list[Host]) -> RunResult:
        """Continue without hosts that are gone without a reason, if enough hosts remain."""
        rendezvous = self._rendezvous_of_hosts
        text = f"{', '.join(map(str, gone))} {'was' if len(gone) == 1 else 'were'} lost, without a sign of life"
        if self._are_enough(len(gone)):
            rendezvous.publish_leave_reason(text)
            return self._regroup(text)
        assert self._workers is not None
        if self._outcome is None:
            self._workers.attempt.settle()
            return RunResult(WorkerState.HEALTHY)
        self.absent = gone
        return self._fail(worker_group)

    def _are_enough(self, num_gone: int) -> bool:
        """Whether the job can continue without that many of its hosts."""
        rendezvous = self._rendezvous_of_hosts
        num_hosts = len(rendezvous.members) - num_gone + len(rendezvous.membership.waiting)
        return num_hosts >= rendezvous.membership.terms.min_nodes

    def _regroup(self, text: str, *, is_said: bool = True) -> RunResult:
        if is_said:
            line = f"lockstep: {text}; starting all ranks again with the hosts that are there\n"
            say(line)
            if self._logs is not None:
                self._logs.write(line)
        self._rendezvous_of_hosts.regroup()
        return RunResult(WorkerState.HEALTHY)

    def _fail(self, worker_group: WorkerGroup) -> RunResult:
        """End the round as failed: torch begins another one if restarts are left."""
        self._is_judged = True  # the errors of ranks are shown now, or in the failure summary
        self.failures = find_first_failure_of_all(report for report in self._reports() if report is not None)
        count = self._rendezvous_of_hosts.count_failure()
        # torch counts the restarts of this host; the job's count is the same on all hosts.
        self._remaining_restarts = max(0, self._config.max_restarts - count + 1)
        if self._outcome is not None and self._outcome.interrupted_by is not None:
            self._remaining_restarts = 0  # a user who interrupts a failing job does not want it restarted
        if self._remaining_restarts > 0:
            self._announce_restart(count)
        return self._result(worker_group, WorkerState.FAILED)

    def _announce_restart(self, count: int) -> None:
        why = f"{', '.join(map(str, self.absent))} lost" if self.absent else "a rank failed"
        if self.failures and not self.absent:
            why = self.failures[0].describe()
        own = self.failures[0].report if self.failures and self.failures[0].rank in self.ranks else None
        announce_restart(why, count, self._config, self._logs, own.traceback if own is not None else "")

    def _result(self, worker_group: WorkerGroup, state: WorkerState) -> RunResult:
        return RunResult(state, return_values={worker.global_rank: None for worker in worker_group.workers})
