"""Means over ranks that hold different numbers of samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.tools.rehearse.events import RehearsedJob
from lockstep.tools.rehearse.findings.finding import Finding, Kind
from lockstep.tools.rehearse.line import Site

__all__ = ["KINDS"]


def _unequal(moments: Sequence[Sequence[Any]]) -> str:
    """Describe sample counts that differ at one call, given each rank's [batch, samples so far, has ended]."""
    batches, samples, ends = zip(*moments, strict=True)
    if min(batches) < 0 or len(set(ends)) != 1:
        return ""  # Outside a pass, or only some ranks at its end.
    counts = samples if ends[0] else batches
    if min(counts) < 1 or len(set(counts)) == 1:
        return ""  # Unknown, or equal.
    return f"{', '.join(map(str, counts))} samples on ranks 0 to {len(counts) - 1}"


def _by_call(means: Sequence[Sequence[Any]]) -> dict[int, Sequence[Any]]:
    """Number of the call -> [batch, samples so far, has ended] when it was made."""
    return {number: moment for number, *moment in means}


def _means_of_means(job: RehearsedJob) -> Iterator[Finding]:
    """A value divided by the number of ranks, where the ranks have seen different numbers of samples."""
    for sites, seen in job.by_sites("reduced").items():
        by_rank = {process.rank: _by_call(event.data["means"]) for process, event in seen}
        if job.world_size < 2 or set(by_rank) != set(range(job.world_size)):
            continue
        for call in sorted(by_rank[0]):
            if not all(call in moments for moments in by_rank.values()):
                continue
            difference = _unequal([by_rank[rank][call] for rank in range(job.world_size)])
            if difference:
                yield Finding(
                    "mean-of-unequal-means", sites, f"a mean over ranks gives each the same weight: {difference}"
                )
                break


def _unequal_steps(job: RehearsedJob) -> Iterator[Finding]:
    """torch's DDP averages gradients of batches that differ in size."""
    steps: dict[int, tuple[tuple[Site, ...], list[int]]] = {}
    for process, event in job.each("steps"):
        if process.rank is not None:
            steps[process.rank] = event.sites, event.data["sizes"]
    if job.world_size < 2 or set(steps) != set(range(job.world_size)):
        return
    for number, sizes in enumerate(zip(*(steps[rank][1] for rank in range(job.world_size)), strict=False)):
        if min(sizes) > 0 and len(set(sizes)) > 1:
            what = (
                f"step {number} averages the gradients of batches of {', '.join(map(str, sizes))} samples with "
                "the same weight"
            )
            yield Finding("mean-of-unequal-means", steps[0][0], what)
            return


def _judge(job: RehearsedJob) -> Iterator[Finding]:
    yield from _means_of_means(job)
    yield from _unequal_steps(job)


KINDS = (
    Kind(
        "mean-of-unequal-means",
        "means averaged over unequal counts",
        "a mean of the ranks' means is not the mean over samples if ranks have different numbers of them: samples of "
        "smaller ranks count more",
        "reduce the sum and the count in one collective and divide afterwards (lockstep.metrics.Mean does); for "
        "gradients use lockstep.DistributedDataParallel with lockstep.DataLoader, which weight by the global count",
        _judge,
        by_path=True,
    ),
)
