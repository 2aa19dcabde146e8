"""Child processes of the script that failed while it continued."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from lockstep.tools.rehearse.events import RehearsedJob
from lockstep.tools.rehearse.findings.finding import Finding, Kind

__all__ = ["KINDS"]


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    known = [one.name for one in signal.Signals if one == -code]
    return f"was killed by signal {-code}" + "".join(f" ({name})" for name in known)


def _died(job: RehearsedJob) -> Iterator[Finding]:
    """Children that failed, and whose exit code a script that ran to its end never checked."""
    for sites, seen in job.by_sites("child").items():
        children = [event.data for process, event in seen if process.finished]
        if not children:
            continue
        told = [f"{child['name']}, which ran {child['function']}, {_ending(child['code'])}" for child in children]
        yield Finding("child-failed", sites, "; ".join(told) + ", and the script continued")


KINDS = (
    Kind(
        "child-failed",
        "a child process of the script failed unnoticed",
        "join() returns whatever happened: the script continues without that process's work and reports success",
        "start them with torch.multiprocessing.spawn, which raises their exceptions; or check exitcode after join()",
        _died,
        is_failure=True,
    ),
)
