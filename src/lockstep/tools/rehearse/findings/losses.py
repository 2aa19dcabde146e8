"""Losses that are no mean over samples, under an engine that averages gradients over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.tools.rehearse.events import RehearsedJob
from lockstep.tools.rehearse.findings.finding import Finding, Kind

__all__ = ["KINDS"]

# Sums of the same weights in another order.
_TOLERANCE = 1e-6


def _judge(job: RehearsedJob) -> Iterator[Finding]:
    """A sum, or divisors that differ between ranks in one step."""
    for sites, seen in job.by_sites("loss").items():
        by_rank = {process.rank: event.data for process, event in seen}
        if job.world_size < 2 or set(by_rank) != set(range(job.world_size)):
            continue
        what = _describe([by_rank[rank] for rank in range(job.world_size)])
        if what:
            yield Finding("loss-over-other-counts", sites, what)


def _describe(of_ranks: Sequence[Mapping[str, Any]]) -> str:
    found = [{number: (text, value) for number, text, value in data["found"]} for data in of_ranks]
    for number in range(min(data["count"] for data in of_ranks)):
        what = _describe_backward(number, [each.get(number) for each in found])
        if what:
            return what
    return ""


def _describe_backward(number: int, of_ranks: Sequence[tuple[str, float | None] | None]) -> str:
    """What is wrong with the losses of one backward pass; empty if nothing is.

    Args:
        number: the backward pass.
        of_ranks: for each rank the text and the divisor of its loss, without a divisor for a sum; None for a mean.
    """
    text = next((one[0] for one in of_ranks if one is not None), "")
    is_sum = [one is not None and one[1] is None for one in of_ranks]
    if all(is_sum):
        return f"the loss is {text}, and gradients are averaged: the sum over all ranks, divided by their number"
    divisors = [None if one is None else one[1] for one in of_ranks]
    if text and not any(is_sum) and _differ(divisors):
        shown = ", ".join("all its samples" if one is None else f"{one:g}" for one in divisors)
        return f"the loss is {text}; it is divided by {shown} on ranks 0 to {len(of_ranks) - 1}, in backward {number}"
    return ""


def _differ(divisors: Sequence[float | None]) -> bool:
    known = [divisor for divisor in divisors if divisor is not None]
    return len(known) < len(divisors) or not math.isclose(min(known), max(known), rel_tol=_TOLERANCE)


KINDS = (
    Kind(
        "loss-over-other-counts",
        "the loss is no mean over samples",
        "gradients are averaged as if every rank had divided by as much: where ranks divide by different counts (valid "
        "tokens, weights of classes, pixels under a mask), those of the rank with fewer weigh more, and a sum shrinks "
        "with the number of ranks",
        "divide the sum by the count of all ranks: loss = lockstep.mean(loss_sum, count), or lockstep.sum(loss) for a "
        "sum; both work under torch's DistributedDataParallel, too",
        _judge,
        by_path=True,
    ),
)
