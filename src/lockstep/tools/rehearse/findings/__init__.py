"""The kinds of findings, and who makes them.

A kind is a stable id, why it matters, what to do, and a function from what the ranks saw to findings. A finding is
precise or it is not made: where what was seen may be right, nothing is said.

General layout:

* `finding`: a finding, and its kind.
* `starts`: ranks that never join, and scripts that only some launchers can start.
* `sampling`: samplers that repeat an order, pad an evaluation or draw alike; evaluations that ranks do not share.
* `means`: means over ranks with different numbers of samples.
* `collectives`: collectives that not all ranks come to; `metrics`: reductions made for nothing.
* `checkpoints`: files that several ranks write, names with a prefix, loads onto the wrong device.
* `identity`: ranks and devices taken from the wrong variable; `children`: processes that died unseen.
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
    """All findings, by file and line; what was seen twice is said once."""
    found: dict[tuple[str, tuple[Site, ...]], Finding] = {}
    families = job.families()
    for kind in KINDS.values():
        for part in (job,) if kind.spans_families else families:
            for finding in kind.judge(part):
                found.setdefault((finding.id, finding.sites if kind.by_path else finding.sites[:1]), finding)
    order = list(KINDS)
    return sorted(found.values(), key=lambda one: (one.sites[:1], order.index(one.id), one.sites))
