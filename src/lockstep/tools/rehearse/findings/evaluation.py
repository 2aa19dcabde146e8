"""Evaluation that ranks do not share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from lockstep.tools.rehearse.events import RehearsedJob, TraceEvent
from lockstep.tools.rehearse.findings.finding import Finding, Kind
from lockstep.tools.rehearse.line import Site

__all__ = ["KINDS"]


def _whole_set_on_each(job: RehearsedJob) -> Iterator[Finding]:
    """A whole pass that trains nothing, over the very same samples on every rank."""
    passes: dict[tuple[tuple[Site, ...], tuple[Site, ...], int], dict[int, TraceEvent]] = defaultdict(dict)
    for process, event in job.each("pass"):
        data = event.data
        is_evaluation = data["finished"] and not data["trained"] and not data["backwards"]
        if is_evaluation and data["content"] and process.rank is not None and process.joined:
            loader = tuple(Site.load(values) for values in data["loader"])
            passes[loader, event.sites, data["number"]].setdefault(process.rank, event)
    for (loader, sites, _), by_rank in passes.items():
        if len(by_rank) == job.world_size > 1 and len({event.data["content"] for event in by_rank.values()}) == 1:
            samples = next(iter(by_rank.values())).data["samples"]
            what = f"each of {job.world_size} ranks evaluated the same {samples} samples"
            yield Finding("evaluation-on-every-rank", loader or sites, what)


KINDS = (
    Kind(
        "evaluation-on-every-rank",
        "every rank evaluates the whole data set",
        "evaluation takes as long on N GPUs as on one, and counts that are summed over ranks are N times too large",
        "give each rank a share (lockstep.DataLoader hands out every sample once) and reduce sums and counts together",
        _whole_set_on_each,
    ),
)
