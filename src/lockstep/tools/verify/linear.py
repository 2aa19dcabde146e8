"""Why a gradient is not that of one process, though the outputs are: read from which sum of the ranks' it is.

[Note: as a sum of the ranks'] The ranks compute gradients of their own losses. A loss that is a mean over samples
has a gradient that is the mean of those, each weighted by its rank's samples. If the gradient of one process is such
a sum with other weights, the weights tell what the loss is divided by: nothing (a sum), counts of something else
than samples (tokens, a mask, weights of classes), or something that is no count (a root, a logarithm, a maximum). If
it is no such sum with any weights, the loss compares samples with each other, or takes a statistic of them.
"""

from __future__ import annotations

import math

from lockstep.tools.verify.causes import Difference, StepOfJob
from lockstep.tools.verify.compare import Gradients, Losses

__all__ = ["read_gradients"]

_CLOSE = 1e-3


def _close(a: float, b: float, tolerance: float = _CLOSE) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-12)


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def read_gradients(step: StepOfJob, gradients: Gradients, losses: Losses, padded: int) -> Difference:
    """Where gradients part though all outputs are the same. See [Note: as a sum of the ranks']."""
    stage = "gradients" if losses.are("weighted", 1e-4) or losses.are("sum", 1e-4) else "loss"
    measured = _measured(gradients, losses)
    needed = _weights_needed(step, gradients, losses)
    if _is_mended_late(gradients, needed, losses):
        return step.found(
            "gradients",
            "before-averaging",
            f"{measured}; the weighted mean of what the ranks computed is one process's gradient, and what the "
            "optimizer took is not",
            "gradients were changed in each rank before they were averaged (clipped, unscaled, rounded), or "
            "divided once more after",
            "clip and unscale after the averaging: after backward(), and with Horovod between "
            "optimizer.synchronize() and step()",
        )
    if padded and needed is None:
        return step.found(
            "outputs",
            "padding",
            f"{measured}; {padded} samples were padded to another length",
            "the model or the loss sees the padding, which a rank makes as long as the longest of its own samples",
            "pad to one length, or mask the padding",
        )
    cause, meaning, advice = _meaning(step, gradients, losses, needed)
    return step.found(stage, cause, measured, meaning, advice)


def _measured(gradients: Gradients, losses: Losses) -> str:
    ranks = "; ".join(_numbers([value for value in each if value is not None]) for each in losses.ranks)
    ones = _numbers([value for value in losses.one if value is not None])
    text = f"the outputs are the same; loss of one process {ones}, of the ranks {ranks}"
    for how, words in (("weighted", "their weighted mean"), ("sum", "their sum")):
        found = losses.sums(how)
        if found is not None:
            text += f" ({words} {found[1]:.6g})"
    if gradients.factor is not None:
        return text + f"; the gradient of every parameter is {gradients.factor:.4g} times that of one process"
    names = gradients.used.names
    if len(names) < gradients.used.count:
        text += f"; the gradients of {len(names)} of {gradients.used.count} parameters differ"
        return text + f", by up to {gradients.used.worst:.1e}"
    return text + f"; the gradients differ by up to {gradients.used.worst:.1e}, by no common factor"


def _weights_needed(step: StepOfJob, gradients: Gradients, losses: Losses) -> list[float] | None:
    """By how much each rank's loss would have to count, relative to the weight that averaging gave it; None for "
    "no answer."""
    if not gradients.needed.is_good or not gradients.needed.factors:
        return None
    taken = gradients.taken.factors if gradients.taken.is_good else ()
    found = []
    for place, factor in enumerate(gradients.needed.factors):
        given = taken[place] if place < len(taken) and abs(taken[place]) > 1e-9 else 1 / len(losses.ranks)
        found.append(factor / given)
    return found


def _is_mended_late(gradients: Gradients, needed: list[float] | None, losses: Losses) -> bool:
    if not gradients.needed.is_good or gradients.taken.is_good:
        return False
    factors = gradients.needed.factors
    return bool(factors) and _close(sum(factors), 1.0 * _num_passes(losses), 1e-2)


def _num_passes(losses: Losses) -> int:
    return max(1, len(losses.one))


def _meaning(step: StepOfJob, gradients: Gradients, losses: Losses, needed: list[float] | None) -> tuple[str, str, str]:
    world = step.job.world_size
    if losses.are("sum", 1e-6) and not losses.are("weighted", 1e-3):
        return (
            "sum",
            "the loss is a sum over samples: averaging divides it by the number of ranks",
            "lockstep.sum(loss), or divide by the number of samples",
        )
    if needed is None:
        return _kept() if step.number > 1 and _is_first_odd(step) else _not_linear(losses)
    if all(_close(each, needed[0]) for each in needed):
        if _close(needed[0], world):
            return (
                "sum",
                "the ranks' gradients have to be added, not averaged: the loss is a sum over samples",
                "lockstep.sum(loss)",
            )
        return (
            "factor",
            f"every rank's part counts {1 / needed[0]:.4g} times what it does in one process: the loss is "
            "multiplied or divided by a "
            "number that depends on the number of ranks or on a rank's rows",
            "leave the number of ranks out of the loss, or lockstep.mean(total, count) for what is divided by a count",
        )
    return _by_weights(step, losses, needed)


def _is_first_odd(step: StepOfJob) -> bool:
    """Whether the steps before, which were one process's, were divided among the ranks as this one is."""
    sizes = [[len(batch["keys"]) for each in step.ranks for batch in each["batches"]]]
    before = step.job.facts
    sizes.append([len(batch["keys"]) for each in before for batch in each["steps"][step.number - 2]["batches"]])
    return bool(sizes[0]) and sizes[0] == sizes[1]


def _kept() -> tuple[str, str, str]:
    return (
        "kept-state",
        "the steps before were those of one process, and no weights of the ranks make its gradient now: "
        "something that is "
        "kept from step to step (a centre, a queue, a running mean) follows one rank's rows; or the loss "
        "compares samples",
        "update what is kept by the samples of all ranks (lockstep.all_gather, lockstep.mean)",
    )


def _not_linear(losses: Losses) -> tuple[str, str, str]:
    return (
        "not-linear",
        "no weights of the ranks make one process's gradient: the loss compares samples with each other, takes a "
        "statistic of the "
        "rank's rows (a mean, a deviation, a maximum, advantages, weights), or mixes terms that are divided by "
        "different things",
        "lockstep.all_gather(output) before samples are compared, lockstep.mean(total, count) for each mean that "
        "something "
        "else than a sum is made of, lockstep.sum for terms that are sums",
    )


def _is_weighted(losses: Losses, weights: list[float], tolerance: float) -> bool:
    """Whether one process's loss is the mean of the ranks' with these weights, too; that of a logarithm is not."""
    values = [value for each in losses.ranks for value in each]
    if len(values) != len(weights) or None in values or None in losses.one:
        return True
    mean = sum(weight * float(value or 0) for weight, value in zip(weights, values, strict=True))
    one = sum(float(value or 0) for value in losses.one)
    return abs(mean - one) <= tolerance * max(abs(one), *(abs(float(value or 0)) for value in values))


def _by_weights(step: StepOfJob, losses: Losses, needed: list[float]) -> tuple[str, str, str]:
    rows = [row for each in losses.rows for row in each]
    total = sum(rows) or 1
    weights = (
        [value * row / total for value, row in zip(needed, rows, strict=True)] if len(rows) == len(needed) else needed
    )
    whole = sum(weights)
    shown = _numbers(weights)
    empty = [rank for rank, each in enumerate(losses.ranks) if not all(map(_is_finite, each))]
    if empty:
        return (
            "count",
            f"the loss of rank {empty[0]} is no number: it is divided by a count, which is 0 for that rank's samples",
            "lockstep.mean(total, count)",
        )
    if sum(abs(each) > 1e-6 for each in weights) == 1:
        return (
            "extreme",
            f"one rank's loss makes the whole gradient of one process (weights {shown}): the loss takes one value "
            "out of the batch, "
            "such as a maximum or median, or is cut off",
            "lockstep.all_gather(values) before max() or median()",
        )
    tolerance = max(1e-9, 100 * step.precision)
    is_mean = _close(whole, 1.0, tolerance) and all(each >= -1e-6 for each in weights)
    if is_mean and _is_weighted(losses, weights, 100 * tolerance):
        return (
            "count",
            f"the ranks' losses weigh {shown} in one process, and their samples "
            f"{_numbers([row / total for row in rows])}: the loss is "
            "divided by a count that ranks have more or less of (tokens, a mask, a selection, weights of classes)",
            "lockstep.mean(total, count)",
        )
    return (
        "function-of-mean",
        f"the ranks' losses would have to weigh {shown}, which do not add up to 1: the loss is a function of a "
        "mean over the batch "
        "(a root, a logarithm, a ratio, a threshold)",
        "take the mean of all ranks first: lockstep.mean(total, count), and then the function of it",
    )
