"""Which failure was the first, and how to say so.

When one rank fails the others fail too, because they waited for it, and all of them print
tracebacks. What a person needs is the one that started it, said last, where they look.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch.process import RankExit
from lockstep.launch.report import ErrorReport

__all__ = ["Failure", "find_first_failure", "format_verdict"]

_WIDTH = 88
_MAX_MESSAGE_CHARS = 300
_MAX_OTHERS = 4
_SIGNAL_HINTS = {
    signal.SIGKILL: "out of memory?",
    signal.SIGBUS: "is /dev/shm full?",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up; see its output above",
}


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Attributes:
        ended: its exit.
        report: what it wrote about an exception, or None if it could not.
    """

    ended: RankExit
    report: ErrorReport | None

    @property
    def rank(self) -> int:
        """The rank that failed."""
        return self.ended.rank

    @property
    def exit_code(self) -> int:
        """Exit code for the whole job: the rank's own, or 1 if it had to be stopped after its exception."""
        if self.report is not None and (self.ended.stopped or self.ended.code == 0):
            return 1
        return self.ended.code

    @property
    def _order(self) -> tuple[bool, bool, float]:
        """Causes before echoes before ranks that we ended ourselves; then by time."""
        if self.report is not None:
            return False, self.report.secondary, self.report.time
        return self.ended.stopped, False, self.ended.time

    def describe(self) -> str:
        """A clause without full stop: `rank 2 (pid 4711) failed with ValueError at train.py:81: bad rate`."""
        who = f"rank {self.rank} (pid {self.ended.pid})"
        if self.report is not None:
            place = f" at {_short_path(self.report.file)}:{self.report.line}" if self.report.file else ""
            message = _first_line(self.report.message)
            return f"{who} failed with {self.report.type}{place}" + (f": {message}" if message else "")
        if self.ended.signal is not None:
            return f"{who} was killed by signal {_describe_signal(self.ended.signal)}"
        return f"{who} exited with code {self.ended.code}"


def _short_path(file: str) -> str:
    """Relative to the current folder if it lies below."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _MAX_MESSAGE_CHARS else line[:_MAX_MESSAGE_CHARS] + "…"


def _describe_signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return str(number)
    hint = _SIGNAL_HINTS.get(signal.Signals(number))
    return f"{number} ({name}; {hint})" if hint else f"{number} ({name})"


def find_first_failure(
    exits: Mapping[int, RankExit], reports: Mapping[int, ErrorReport], announced: set[int]
) -> list[Failure]:
    """All failures, the one that started it first.

    Args:
        exits: rank -> how it ended, for all ranks.
        reports: rank -> its error report, for those that wrote one.
        announced: ranks that are known to have failed whatever their exit code.

    Returns:
        Causes by time, then echoes of others' failures by time, then ranks that were only
        stopped. Empty if no rank failed.
    """
    failures = [
        Failure(ended, reports.get(rank))
        for rank, ended in exits.items()
        if ended.code != 0 or rank in reports or rank in announced
    ]
    return sorted(failures, key=lambda failure: failure._order)


def _fate_of_others(failures: list[Failure], num_ranks: int) -> str:
    if num_ranks == 1:
        return ""
    others = failures[1:]
    if any(failure.ended.stopped for failure in others):
        return "; the other ranks were stopped"
    if others:
        return "; other ranks failed after it"
    return "; the other ranks had finished" if num_ranks > 1 else ""


def format_verdict(failures: list[Failure], num_ranks: int, log_dir: str | None = None) -> str:
    """The block that a failed job ends with: the verdict, then the first failure's traceback.

    Args:
        failures: from `find_first_failure`; not empty.
        num_ranks: of the whole job.
        log_dir: folder with the ranks' output, if that went to files.
    """
    first = failures[0]
    rule = "=" * _WIDTH
    lines = [rule, f"lockstep: {first.describe()}{_fate_of_others(failures, num_ranks)}"]
    own_failures = [
        other
        for other in failures[1:]
        if not other.ended.stopped and not (other.report is not None and other.report.secondary)
    ]
    lines += [f"lockstep: after it, {other.describe()}" for other in own_failures[:_MAX_OTHERS]]
    if len(own_failures) > _MAX_OTHERS:
        lines.append(f"lockstep: and {len(own_failures) - _MAX_OTHERS} more ranks")
    if log_dir is not None:
        lines.append(f"lockstep: its output is in {os.path.join(log_dir, f'rank{first.rank}.log')}")
    if first.report is not None:
        lines += ["", first.report.traceback.rstrip("\n")]
    return "\n".join([*lines, rule, ""])
