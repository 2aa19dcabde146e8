"""Determines which failure is the root cause, and writes the failure summary.

When one rank fails the others fail too, because they waited for it, and all of them print tracebacks. The failure
summary comes last, where people look: it names the failure that came first, and where the other ranks were at that
moment.

[Note: whose failure it is] The rank that raises is not always the one to blame. `RankLost` and gloo's message about a
closed connection are secondary failures: they are sorted after all others. A timeout is raised by the ranks that
waited, so the summary begins with the rank that did not come. A rank that ended early with exit code 0 has failed if
others say that they lost it, or, if they cannot name whom they lost, if its count is behind theirs. So has one that we
stopped while it was exiting by itself. But a rank that raised, and caught the exception outside of its world, is not
blamed: the errors of the others are more informative.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lockstep import env
from lockstep.errors import AFTER_CTRL_C, CollectiveMismatch
from lockstep.launch.environment import visible_gpus
from lockstep.launch.headline import (
    first_reason,
    gave_accelerate_a_backend,
    knows_two_backends,
    needs_gpu,
    origin_of,
    why_worker_is_gone,
)
from lockstep.launch.positions import RankStatus, describe_position, describe_statuses, find_missing, short_path
from lockstep.launch.process import RankExit
from lockstep.launch.report import ErrorReport
from lockstep.topology import name_ranks

__all__ = ["RULE", "RankFailure", "find_first_failure", "find_own_errors", "format_last_words", "format_summary"]

RULE = "=" * 88
_MAX_MESSAGE_CHARS = 500
_MAX_OWN_MESSAGE_CHARS = 2000
_OWN_ERRORS = "lockstep.errors."
_MISMATCH = "lockstep.errors.CollectiveMismatch"
_MAX_OTHERS = 4
_SIGNAL_HINTS = {
    "SIGKILL": "out of memory?",
    "SIGBUS": "is /dev/shm full?",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "native code gave up; its output says why",
}


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    Attributes:
        ended: how its process exited.
        report: its error report; None if it wrote none.
        statuses: where every rank was when the first failure was seen.
        is_blamed: whether it left without an error, and others say that they lost it.
    """

    ended: RankExit
    report: ErrorReport | None
    statuses: Mapping[int, RankStatus]
    is_blamed: bool = False

    @property
    def rank(self) -> int:
        """The rank that failed."""
        return self.ended.rank

    @property
    def exit_code(self) -> int:
        """Exit code for the whole job: the rank's own, or 1 if that is not the code of a failure."""
        if self.is_blamed or (self.report is not None and (self.ended.stopped or self.ended.is_good)):
            return 1
        return self.ended.code

    @property
    def missing(self) -> tuple[int, ...]:
        """For a timeout, the ranks that did not come; empty if unknown."""
        if self.report is None or not self.report.is_timeout:
            return ()
        named = self.report.culprits or find_missing(self.statuses, self.rank)
        return tuple(rank for rank in named if rank in self.statuses and rank != self.rank)

    @property
    def _order(self) -> tuple[bool, bool, float]:
        """Causes before secondary failures before ranks that we ended ourselves; then by time."""
        if self.report is not None:
            return False, self.report.secondary, self.report.time
        return self.ended.stopped, False, self.ended.time

    def describe(self) -> str:
        """A clause without a full stop: `rank 2 (pid 4711) failed with ValueError at train.py:81: bad rate`."""
        host = f" on {self.ended.host}" if self.ended.host else ""
        who = f"rank {self.rank} (pid {self.ended.pid}{host})"
        if self.report is not None:
            where = f" at {short_path(self.report.file)}:{self.report.line}" if self.report.file else ""
            message = _short_message(self.report)
            return f"{who} failed with {self.report.type}{where}" + (f": {message}" if message else "")
        known = self.statuses.get(self.rank)
        where = f" {known.describe()}" if known is not None and known.latest is not None else ""
        if self.is_blamed:
            how = "left the group" if self.ended.stopped else f"ended (exit code {self.ended.code})"
            return f"{who} {how}{where} while other ranks still needed it"
        if self.ended.signal is not None:
            return f"{who} was killed by signal {_describe_signal(self.ended.signal)}{where}"
        return f"{who} exited with code {self.ended.code}{where}"

    def is_like(self, other: RankFailure) -> bool:
        """Whether both report the same error; the texts of our own errors may differ in the names of ranks."""
        mine, yours = self.report, other.report
        if self.is_blamed and other.is_blamed:
            return True
        if mine is None and yours is None:
            return self.ended.signal is other.ended.signal is None and self.ended.code == other.ended.code
        if mine is None or yours is None or mine.type != yours.type:
            return False
        if mine.message == yours.message or (mine.is_timeout and yours.is_timeout):
            return True
        return mine.type.startswith(_OWN_ERRORS) and (mine.file, mine.line) == (yours.file, yours.line)


def _short_message(report: ErrorReport) -> str:
    """All lines of one of our messages; of other messages the line with the reason."""
    is_own = report.type.startswith(_OWN_ERRORS)
    limit = _MAX_OWN_MESSAGE_CHARS if is_own else _MAX_MESSAGE_CHARS
    line = origin_of(report.type, report.message) or why_worker_is_gone(report.message, report.traceback)
    if line is None:
        line = _as_paragraph(report.message) if is_own else first_reason(report.message)
    return line if len(line) <= limit else line[:limit] + "…"


def _as_paragraph(text: str) -> str:
    """Turn the lines of a list into clauses."""
    text = text.strip().replace(":\n  ", ": ").replace("\n  ", "; ")
    return ". ".join(line.strip() for line in text.splitlines())


def _describe_signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return str(number)
    hint = _SIGNAL_HINTS.get(name)
    return f"{number} ({name}; {hint})" if hint else f"{number} ({name})"


def find_first_failure(
    exits: Mapping[int, RankExit],
    reports: Mapping[int, ErrorReport],
    announced: set[int],
    statuses: Mapping[int, RankStatus] | None = None,
) -> list[RankFailure]:
    """All failures, the root cause first. See [Note: whose failure it is].

    Args:
        exits: rank -> how it ended, for all ranks.
        reports: rank -> its error report, for those that wrote one.
        announced: ranks that are known to have failed, whatever their exit code.
        statuses: where every rank was when the first failure was seen, if known.

    Returns:
        Causes by time, then secondary failures by time, then ranks that were only stopped. Empty if no rank failed.
    """
    known = statuses or {}
    failures = [
        RankFailure(ended, reports.get(rank), known, is_blamed=ended.is_missed)
        for rank, ended in exits.items()
        if not ended.is_good or rank in reports or rank in announced
    ]
    failures.sort(key=lambda failure: failure._order)
    blamed = [one for one in _find_lost(failures, exits, known) if one.rank not in reports]
    others = [one for one in failures if one.ended not in blamed]
    return [RankFailure(one, None, known, is_blamed=True) for one in blamed] + others


def _find_lost(
    failures: list[RankFailure], exits: Mapping[int, RankExit], statuses: Mapping[int, RankStatus]
) -> list[RankExit]:
    """The ranks that left without an error, if all failures follow from that."""
    report = failures[0].report if failures else None
    if report is None or not report.secondary:
        return []
    named = report.culprits or find_missing(statuses, report.rank)  # gloo names no ranks
    lost = [exits[rank] for rank in named if rank in exits and not (rank in statuses and statuses[rank].has_raised)]
    return [one for one in lost if one.is_good or (one.stopped and report.culprits)]


def _fate_of_others(failures: list[RankFailure], num_ranks: int) -> str:
    """Where the other ranks were, or how they ended; without those that `_after` lists."""
    first, others = failures[0], failures[1:]
    if num_ranks == 1:
        return ""
    listed = {first.rank, *(one.rank for one in _causes_among(failures) if one.is_like(first))}
    statuses = describe_statuses({rank: status for rank, status in first.statuses.items() if rank not in listed})
    if statuses:
        return f"; {statuses}"
    if not others:
        return "; the other ranks had finished"
    secondary = [one for one in others if one not in _causes_among(failures)]
    if not secondary:
        return ""
    are_all = len(secondary) == num_ranks - 1
    who = "the other ranks" if are_all else name_ranks(sorted(one.rank for one in secondary))
    if any(one.ended.stopped for one in secondary):
        return f"; {who} {'were' if are_all or len(secondary) > 1 else 'was'} stopped"
    return f"; {who} failed after it"


def _accuse_missing(first: RankFailure) -> str:
    """The first line for a timeout: which ranks did not come and where they are; then where the waiting ranks are."""
    clauses = []
    waiting = first.statuses[first.rank].latest if first.rank in first.statuses else None
    call = describe_position(waiting).partition(" ")[2] if waiting else ""
    for rank in first.missing:
        status = first.statuses[rank]
        where = f"it was {status.describe()}" if status.latest is not None else "it had not entered a collective yet"
        stopped = ", and its process is stopped" if status.is_stopped else ""
        awaited = f"did not reach {call}: {where}" if waiting else f"did not come: {where}"
        if waiting and status.describe().partition(" ")[2] == call:
            awaited = f"reached {call} too late"
        clauses.append(f"rank {rank} (pid {status.pid}) {awaited}{stopped}")
    others = describe_statuses({rank: status for rank, status in first.statuses.items() if rank not in first.missing})
    return "; ".join([*clauses, others] if others else clauses)


def _accuse_different(first: RankFailure) -> str:
    """The first line for a mismatch: the ranks outside the majority; the message says what each of them called."""
    assert first.report is not None
    culprits = [rank for rank in first.report.culprits if rank in first.statuses]
    names = ", ".join(f"rank {rank} (pid {first.statuses[rank].pid})" for rank in culprits)
    return (f"{names} called a different collective: " if names else "") + first.report.message.strip()


def _is_mismatch(failure: RankFailure) -> bool:
    return failure.report is not None and failure.report.type == _MISMATCH


def _opening(failures: list[RankFailure], num_ranks: int) -> str:
    """The paragraph with the root cause and the positions of the other ranks."""
    first = failures[0]
    if first.missing:
        return _accuse_missing(first)
    if _is_mismatch(first):
        return _accuse_different(first)
    return first.describe() + _fate_of_others(failures, num_ranks)


def _causes_among(failures: list[RankFailure]) -> list[RankFailure]:
    """The other independent failures: neither secondary nor stopped, unless with the same error as the first."""
    first, *others = failures
    own = [one for one in others if one.report is None or not one.report.secondary]
    return [one for one in own if not one.ended.stopped or one.is_like(first)]


def _after(failures: list[RankFailure]) -> list[str]:
    """Lines for other independent failures; none for a mismatch, whose message names all ranks."""
    first, own = failures[0], _causes_among(failures)
    alike = [other for other in own if other.is_like(first)]
    own = [other for other in own if not other.is_like(first)]
    lines = []
    if alike and not _is_mismatch(first):
        what = "end" if first.report is None else "error"
        lines.append(f"lockstep: the same {what} on {name_ranks(sorted(other.rank for other in alike))}")
    lines += [f"lockstep: after it, {other.describe()}" for other in own[:_MAX_OTHERS]]
    if len(own) > _MAX_OTHERS:
        lines.append(f"lockstep: and {len(own) - _MAX_OTHERS} more ranks")
    return lines


def _failure_to_show(failures: list[RankFailure]) -> RankFailure:
    """The failure whose traceback shows the cause: for a mismatch, that of a rank that called something else."""
    first = failures[0]
    if not _is_mismatch(first):
        return first
    assert first.report is not None
    return next((one for one in failures if one.rank in first.report.culprits and _is_mismatch(one)), first)


def _tracebacks(failures: list[RankFailure], ranks: Collection[int] | None) -> list[str]:
    """The traceback that shows the cause, then those of independent failures of other kinds."""
    first, others = failures[0], failures[1:]
    shown_first = _failure_to_show(failures)
    shown = []
    if shown_first.report is not None:
        is_here = _is_here(shown_first, ranks)
        elsewhere = f"lockstep: the launcher on {shown_first.ended.host} shows the traceback of rank {shown_first.rank}"
        shown = ["", _without_what_was_said(shown_first)] if is_here else [elsewhere]
    with_traceback = [one for one in others if one.report is not None and _is_here(one, ranks)]
    if first.is_blamed and with_traceback:  # it has no traceback, and another shows what it was needed for
        shown += _traceback_of(with_traceback[0])
    ways = {_way_of(one) for one in (shown_first, first)}
    for other in [one for one in _causes_among(failures) if one in with_traceback][:_MAX_OTHERS]:
        if not other.is_like(first) and _way_of(other) not in ways:
            ways.add(_way_of(other))
            shown += _traceback_of(other)
    return shown


def _is_here(failure: RankFailure, ranks: Collection[int] | None) -> bool:
    return ranks is None or failure.rank in ranks


def _way_of(failure: RankFailure) -> tuple[object, ...]:
    """A key by type and frames, equal for errors that only differ in a number; by rank if no frame is known."""
    report = failure.report
    lines = report.traceback.splitlines() if report is not None else []
    frames = [line for line in lines if line.lstrip().startswith('File "')]
    return (report.type, *frames) if report is not None and frames else (failure.rank,)


def _traceback_of(failure: RankFailure) -> list[str]:
    assert failure.report is not None
    return ["", f"rank {failure.rank}:", failure.report.traceback.rstrip("\n")]


def _without_what_was_said(failure: RankFailure) -> str:
    """The traceback, without the message of one of our errors, which the summary has already shown."""
    report = failure.report
    assert report is not None
    trace, said = report.traceback.rstrip("\n"), f"{report.type}: {report.message}".rstrip()
    is_said = report.type.startswith(_OWN_ERRORS) and not failure.missing
    if not is_said or len(report.message) > _MAX_OWN_MESSAGE_CHARS or not trace.endswith(said):
        return trace
    return f"{trace.removesuffix(said)}{report.type}: see above"


def _advise(first: RankFailure, num_ranks: int, script: str | None) -> list[str]:
    """Advice for errors with a known solution."""
    if first.is_blamed:
        return [
            "lockstep: nothing failed there. Call collectives on all ranks, not under `if rank == 0`. If it stopped "
            "because of its own value, such as its loss, let all ranks agree with lockstep.any(…)"
        ]
    if first.report is not None and gave_accelerate_a_backend(first.report.message):
        return [
            "lockstep: Accelerate uses an existing group, but rejects this backend name: call `lockstep.init()` "
            "before `Accelerator()`, and pass no backend"
        ]
    if first.report is not None and knows_two_backends(first.report.type, first.report.traceback):
        return [
            "lockstep: the program accepts only the backend names gloo and nccl. Add 'lockstep' where it compares "
            "them, or pass the function a gloo group: group=torch.distributed.new_group(backend='gloo')"
        ]
    if script is None or first.report is None or not needs_gpu(first.report.message):
        return []
    if visible_gpus(env.snapshot()) > 0:
        return []
    return [
        f"lockstep: there is no GPU on this host: `lockstep rehearse --nproc {num_ranks} {script}` runs the script on "
        "CPUs, and reports what would fail on GPUs"
    ]


def _advise_after_ctrl_c(failures: list[RankFailure]) -> list[str]:
    """Advice if a rank communicates after Ctrl-C, while another has not left its collective yet."""
    reports = [each.report for each in failures if each.report is not None]
    if not any(one.after_interrupt and one.type.endswith(CollectiveMismatch.__name__) for one in reports):
        return []
    return [f"lockstep: {AFTER_CTRL_C}"]


def format_summary(
    failures: list[RankFailure],
    num_ranks: int,
    log_dir: str | None = None,
    script: str | None = None,
    ranks: Collection[int] | None = None,
) -> str:
    """The text with which a failed job ends: the root cause, then the tracebacks of independent failures.

    Args:
        failures: from `find_first_failure`; not empty.
        num_ranks: number of ranks in the whole job.
        log_dir: folder with the ranks' output, if that went to files.
        script: target and arguments, as on the command line; None if this is already a rehearsal.
        ranks: the ranks of this host, in a job on several, where each host shows its own tracebacks. None for all.
    """
    first = failures[0]
    advice = _advise_after_ctrl_c(failures) or _advise(first, num_ranks, script)
    lines = [RULE, f"lockstep: {_opening(failures, num_ranks)}", *_after(failures), *advice]
    if log_dir is not None:
        where = "" if _is_here(first, ranks) else f" on {first.ended.host}"
        lines.append(f"lockstep: its output is in {os.path.join(log_dir, f'rank{first.rank}.log')}{where}")
    return "\n".join([*lines, *_tracebacks(failures, ranks), RULE, ""])


def find_own_errors(failures: list[RankFailure]) -> list[RankFailure]:
    """The failures of ranks that raised independently of others, in a job that was told to end.

    If all raised because of another rank, these are the ones that did so after Ctrl-C: what they meant to save is not
    saved. Errors during an import do not count: Ctrl-C in the middle of one becomes another error if a library catches
    all exceptions, or continues with a partly imported module.

    Args:
        failures: from `find_first_failure`.
    """
    reports = [(one, one.report) for one in failures if one.report is not None]
    reports = [(one, report) for one, report in reports if not report.in_import]
    own = [one for one, report in reports if not report.secondary]
    return own or [one for one, report in reports if report.after_interrupt]


def format_last_words(failures: list[RankFailure]) -> str:
    """Errors that ranks raised although they were only told to end, as a failure summary; empty if there are none.

    Args:
        failures: from `find_first_failure`.
    """
    own = find_own_errors(failures)
    return format_summary(own, len(own)) if own else ""
