"""Reductions whose result is unused, or that could be combined."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.tools.rehearse.events import RehearsedJob
from lockstep.tools.rehearse.findings.finding import Finding, Kind

__all__ = ["KINDS"]

_MIN_TIMES = 2


def _thrown_away(job: RehearsedJob) -> Iterator[Finding]:
    """No rank that receives the result ever reads it."""
    for sites, seen in job.by_sites("reduced").items():
        received = [(process, event.data) for process, event in seen if event.data["root"] in (None, process.rank)]
        if not all(process.finished for process, _ in received):
            continue  # a rank that failed might have read it later
        getters = [data for _, data in received]
        instances = sum(data["instances"] for data in getters)
        if (
            instances
            and min(data["instances"] for data in getters) >= _MIN_TIMES
            and not any(data["reads"] for data in getters)
        ):
            times = getters[0]["instances"]
            what = f"the value was reduced {times} times, and no rank used the result"
            # The callers matter: they dropped the result of the function that reduces.
            yield Finding("reduced-value-unused", sites, what)


def _bursts(job: RehearsedJob) -> Iterator[Finding]:
    """Several reductions of single numbers in a row, repeatedly."""
    for sites, seen in job.by_sites("burst").items():
        data = max((event.data for _, event in seen), key=lambda one: one["times"])
        if data["times"] >= _MIN_TIMES:
            first = "a barrier and " if data["barrier"] else ""
            what = f"{first}{data['reductions']} reductions of single numbers in a row, {data['times']} times"
            yield Finding("reductions-one-by-one", sites, what)


KINDS = (
    Kind(
        "reduced-value-unused",
        "a reduced value is not used",
        "the ranks wait for each other and drop the result: what is logged is the value of one rank",
        "use the result of the reduction (with all_reduce, the tensor that was passed to it), or remove it",
        _thrown_away,
        by_path=True,
    ),
    Kind(
        "reductions-one-by-one",
        "several collectives where one would do",
        "each costs the latency of the slowest rank, in every step; a barrier before a reduction adds one more and "
        "changes nothing, since a reduction waits too",
        "stack the numbers into one tensor and reduce it once, without a barrier; best once per epoch",
        _bursts,
        by_path=True,
    ),
)
