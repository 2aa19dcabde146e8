"""The kinds of findings, and the functions that detect them.

A kind has a stable id, a reason why it matters, a fix, and a function that turns the ranks' records into findings.
Something that might be correct is not reported.

General layout:

* `finding`: a finding, and its kind.
* `starts`: ranks that never join, and scripts that only some launchers can start.
* `sampling`: repeated shuffles, padded evaluations, equal augmentation on all ranks, evaluations not split among ranks.
* `means`: means over ranks with different numbers of samples.
* `collectives`: collectives that not all ranks call; `metrics`: useless or repeated reductions.
* `checkpoints`: files that several ranks write, names with a prefix, loads onto the wrong device.
* `identity`: ranks and devices taken from the wrong variable; `children`: child processes whose failure went unnoticed.
* `steps`: learning rate, schedule and clipping of a step.
"""

from __future__ import annotations

from lockstep.tools.rehearse.events import RehearsedJob
from lockstep.tools.rehearse.findings import (
    checkpoints,
    children,
    collectives,
    identity,
    means,
    metrics,
    sampling,
    starts,
    steps,
)
from lockstep.tools.rehearse.findings.finding import Finding, Kind
from lockstep.tools.rehearse.line import Site

__all__ = ["KINDS", "Finding", "Kind", "judge"]

KINDS: dict[str, Kind] = {
    kind.id: kind
    for module in (
        starts,
        sampling,
        means,
        collectives,
        checkpoints,
        identity,
        steps,
        metrics,
        children,
    )
    for kind in module.KINDS
}


def judge(job: RehearsedJob) -> list[Finding]:
    """All findings, sorted by file and line, without duplicates."""
    found: dict[tuple[str, tuple[Site, ...]], Finding] = {}
    families = job.families()
    for kind in KINDS.values():
        for part in (job,) if kind.spans_families else families:
            for finding in kind.judge(part):
                found.setdefault((finding.id, finding.sites if kind.by_path else finding.sites[:1]), finding)
    order = list(KINDS)
    return sorted(found.values(), key=lambda one: (one.sites[:1], order.index(one.id), one.sites))
