"""Why a gradient is not that of one process, though the outputs are: read from which sum of the ranks' it is.

[Note: as a sum of the ranks'] The ranks compute gradients of their own losses. A loss that is a mean over samples
has a gradient that is the mean of those, each weighted by its rank's samples. If the gradient of one process is such
a sum with other weights, the weights tell what the loss is divided by: nothing (a sum), counts of something else
than samples (tokens, a mask, weights of classes), or something that is no count (a root, a logarithm, a maximum). If
it is no such sum with any weights, the loss compares samples with each other, or takes a statistic of them.
"""

from __future__ import annotations

import math
import operator

from lockstep.tools.verify.causes import Difference, StepOfJob, describe_draws, unlike_draws
from lockstep.tools.verify.compare import Fit, Gradients, Losses

__all__ = ["read_gradients"]

_CLOSE = 1e-3
_MAY_BE_DRAWN = ("not-linear", "kept-state", "function-of-mean", "threshold")
_SUM = (
    "sum",
    "the loss is a sum over samples: averaging makes a mean of the ranks' sums",
    "lockstep.sum(loss), or divide by the number of samples; lockstep.global_loss(loss) where gradients are divided "
    "later",
)
_CHANGED = (
    "after-averaging",
    "the gradients were those of one process when backward() returned, and were then changed otherwise than there: "
    "clipped to a limit, or multiplied by a factor, that depends on the number of ranks",
    "leave the number of ranks out of max_norm, clip_value, and whatever else changes gradients",
)
_WHOLE = (
    "whole-batch",
    "each rank's loss is that of the whole batch, by collectives of torch, and the averaging takes it for that of the "
    "rank's own samples",
    "lockstep.all_gather(output) in place of torch's collectives",
)
_KEPT = (
    "kept-state",
    "the steps before were those of one process, and no mean of the ranks makes its gradient now: something that is "
    "kept from step to step (a centre, a queue, weights by earlier losses) follows one rank's rows; or a term came in, "
    "or counts were equal by chance before, and the loss compares samples, is cut off, or adds terms that are divided "
    "by different counts",
    "update what is kept by the samples of all ranks (lockstep.all_gather(rows)); in the loss, lockstep.mean(total, "
    "count) for each mean, lockstep.sum for sums, lockstep.all_gather(output) before samples are compared",
)
_NOT_LINEAR = (
    "not-linear",
    "no weights of the ranks make one process's gradient: the loss compares samples with each other, takes a "
    "statistic of the rank's rows (a mean, a deviation, a maximum, advantages, weights), or mixes terms that are "
    "divided by different things",
    "lockstep.all_gather(output) before samples are compared, and for a mean of each feature; lockstep.mean(total, "
    "count) for each number that is a mean, and of which something else than a sum is made; lockstep.sum for terms "
    "that are sums",
)


def _close(a: float, b: float, tolerance: float = _CLOSE) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-12)


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def read_gradients(step: StepOfJob, gradients: Gradients, losses: Losses, padded: int) -> Difference:
    """Where gradients part though all outputs are the same. See [Note: as a sum of the ranks']."""
    least = max(1e-9, 100 * step.precision, step.rounding)
    stage = "gradients" if losses.are("weighted", least) or losses.are("sum", least) else "loss"
    seen = "the outputs are the same"
    if not any(call["outputs"] is not None for call in step.one["calls"]):
        seen = "no output is a row for each sample"
    elif padded:
        seen = "outputs of samples that are padded to other lengths are not compared"
    measured = _measured(gradients, losses, seen, max(_CLOSE, step.rounding))
    if gradients.were_alike:
        return step.found("gradients", _CHANGED[0], measured, *_CHANGED[1:])
    given = _given(step, losses)
    needed, taken = _weights(gradients.needed, given, 1.0), _weights(gradients.taken, given, gradients.scale)
    averaging = _after_losses(step, needed, taken, given, losses)
    if averaging is not None:
        return step.found("gradients", averaging[0], measured, *averaging[1:])
    if padded and needed is None:
        return step.found(
            stage,
            "padding",
            f"{measured}; {padded} samples were padded to another length",
            "the loss or the model sees the padding, which a rank makes as long as the longest of its own samples; or, "
            "if that is masked in both, the loss adds terms that are divided by different counts",
            "pad to one length, or mask the padding; and lockstep.mean(total, count) for each term",
        )
    cause, meaning, advice = _meaning(step, losses, gradients.zeros, needed, taken)
    drawn, _ = unlike_draws(step)
    if drawn and cause in _MAY_BE_DRAWN:
        return step.found(
            stage,
            "drawn",
            f"{measured}; {describe_draws(drawn)}",
            f"each rank draws its own numbers, which the loss may depend on. If it does not: {meaning}",
            f"draw them once per step, from a generator that all ranks seed alike; else {advice}",
        )
    if stage == "gradients" and cause == "not-linear":
        meaning += "; or a hook, or the backward of an autograd.Function, changes gradients by what a rank has itself"
    return step.found(stage, cause, measured, meaning, advice)


def _measured(gradients: Gradients, losses: Losses, seen: str, tolerance: float) -> str:
    ranks = "; ".join(_numbers([value for value in each if value is not None]) for each in losses.ranks)
    ones = _numbers([value for value in losses.one if value is not None])
    text = f"{seen}; loss of one process {ones}, of the ranks {ranks}" if ones else f"{seen}; backward() was not called"
    for how, words in (("weighted", "their weighted mean"), ("sum", "their sum")):
        found = losses.sums(how)
        if ones and found is not None:
            text += f" ({words} {found[1]:.6g})"
    if gradients.factor is not None and not _close(gradients.factor, 1.0, tolerance):
        return text + f"; the gradient of every parameter is {gradients.factor:.4g} times that of one process"
    names = gradients.used.names
    if len(names) < gradients.used.count:
        text += f"; the gradients of {len(names)} of {gradients.used.count} parameters differ"
        return text + f", by up to {gradients.used.worst:.1e}"
    return text + f"; the gradients differ by up to {gradients.used.worst:.1e}, by no common factor"


def _given(step: StepOfJob, losses: Losses) -> list[float]:
    """How much averaging makes each rank's loss count: by samples in Lockstep's engine, else one of N."""
    weighs = any(each["own"] for each in step.job.facts[0]["engines"])
    return [weight if weighs else 1 / len(losses.ranks) for each in losses.weights for weight in each]


def _weights(fit: Fit, given: list[float], scale: float | None) -> list[float] | None:
    """How much each rank's loss counts in a gradient; None if that is no sum of the ranks'.

    What reached their parameters, and `fit` is made of, was weighted by Lockstep's engine as averaging makes it count
    (`given`); a process takes `scale` of what it computed.
    """
    if not fit.is_good or not scale or len(given) != len(fit.factors):
        return None
    count = round(len(given) / sum(given)) if sum(given) else 1
    return [count * factor * weight / scale for factor, weight in zip(fit.factors, given, strict=True)]


def _are_close(a: list[float], b: list[float], tolerance: float = 1e-2) -> bool:
    return len(a) == len(b) and all(
        abs(x - y) <= tolerance * max(abs(x), abs(y), 0.1) for x, y in zip(a, b, strict=True)
    )


def _after_losses(
    step: StepOfJob, needed: list[float] | None, taken: list[float] | None, given: list[float], losses: Losses
) -> tuple[str, str, str] | None:
    """What is wrong with the averaging, where one process's loss is the mean over samples of the ranks'."""
    if needed is None or not _are_close(needed, losses.shares):
        return None
    if taken is None or not (_are_close(taken, given) or _has_one_ratio(taken, needed)):
        return (
            "before-averaging",
            "the weighted mean of what the ranks computed is one process's gradient, and what the optimizer took is "
            "not: gradients were changed in each rank before they were averaged (clipped, unscaled, rounded), or "
            "divided once more after",
            "clip and unscale after the averaging: after backward(), and with Horovod between "
            "optimizer.synchronize() and step()",
        )
    if _are_close(given, losses.shares):
        return None
    leaves_out = any(each["own"] for each in step.job.facts[0]["loaders"])
    by_means = any(each["weighed"] for ranks in step.ranks for each in ranks["backwards"])
    return (
        "uneven",
        f"the ranks had {', '.join(str(row) for each in losses.rows for row in each)} samples, and their means count "
        f"{_numbers(given)} of the whole",
        "lockstep.mean(loss * len(y), len(y)): a rank's part counts as much as it is given to"
        if by_means
        else "with model.samples(0 if lockstep.is_filler(batch) else len(x)): output = model(x), where collate_fn or "
        "the loop leaves samples out"
        if leaves_out
        else "give all ranks equally many samples in each step (drop_last=True), or train with lockstep.DataLoader and "
        "lockstep.DistributedDataParallel, which weigh ranks by their samples; model.samples(n) says how many a pass "
        "holds",
    )


def _has_one_ratio(a: list[float], b: list[float], tolerance: float = _CLOSE) -> bool:
    ratios = [x / y for x, y in zip(a, b, strict=True) if abs(y) > 1e-9]
    return bool(ratios) and all(_close(each, ratios[0], tolerance) for each in ratios)


def _meaning(
    step: StepOfJob, losses: Losses, zeros: tuple[bool, ...], needed: list[float] | None, taken: list[float] | None
) -> tuple[str, str, str]:
    if losses.are("sum", max(1e-6, step.rounding)) and not losses.are("weighted", max(1e-3, step.rounding)):
        return _SUM
    is_whole = all(_close(loss, one, 1e-5) for loss, one in _pairs(losses))
    if needed is None:
        return _threshold(zeros) if any(zeros) else _unexplained(step)
    if is_whole and len(set(losses.shares)) > 1:
        return _WHOLE
    counted = taken if taken is not None else [1 / len(step.ranks)] * len(needed)
    tolerance = max(_CLOSE, step.rounding)
    if all(counted) and _has_one_ratio(needed, counted, tolerance):
        return _one_factor(counted[0] / needed[0], len(step.ranks), is_whole, tolerance)
    return _by_weights(step, losses, zeros, needed)


def _unexplained(step: StepOfJob) -> tuple[str, str, str]:
    return _KEPT if step.number > 1 and _is_first_odd(step) else _NOT_LINEAR


def _one_factor(factor: float, world_size: int, is_whole: bool, tolerance: float) -> tuple[str, str, str]:
    if _close(factor * world_size, 1.0, tolerance):
        return _WHOLE if is_whole else _SUM
    return (
        "factor",
        f"every rank's part counts {factor:.4g} times what it does in one process: the loss is multiplied or divided "
        "by a number that depends on the number of ranks or on a rank's rows, or gradients are added and not averaged",
        "leave the number of ranks out of the loss, or lockstep.mean(total, count) for what is divided by a count",
    )


def _threshold(zeros: tuple[bool, ...]) -> tuple[str, str, str]:
    who = "one process" if zeros[-1] else "a rank"
    return (
        "threshold",
        f"the gradient of {who} is zero, and others are not: the loss is skipped, cut off or multiplied by zero by a "
        "value of the rank's own samples",
        "decide by what all ranks have: lockstep.mean(loss * len(y), len(y)), lockstep.any(…)",
    )


def _pairs(losses: Losses) -> list[tuple[float, float]]:
    """Each rank's loss, and one process's; a pair that is far apart where there is no loss."""
    values = [(value, one) for each in losses.ranks for value, one in zip(each, losses.one, strict=False)]
    return [(0.0, 1.0) if value is None or one is None else (value, one) for value, one in values]


def _is_first_odd(step: StepOfJob) -> bool:
    """Whether the steps before, which were one process's, were divided among the ranks as this one is."""
    steps = step.ranks, [each["steps"][step.number - 2] for each in step.job.facts]
    now, before = ([batch["rows"] for each in ranks for batch in each["batches"]] for ranks in steps)
    return bool(now) and now == before


def _is_weighted(losses: Losses, weights: list[float], tolerance: float) -> bool:
    """Whether one process's loss is the mean of the ranks' with these weights, too; that of a logarithm is not."""
    values = [value for each in losses.ranks for value in each]
    if len(values) != len(weights) or None in values or None in losses.one:
        return True
    theirs, one = [float(value or 0) for value in values], sum(float(value or 0) for value in losses.one)
    mean = sum(map(operator.mul, weights, theirs))
    spread, most = max(theirs) - min(theirs), max(abs(each) for each in (one, *theirs))
    return bool(abs(mean - one) <= tolerance * spread + tolerance / 100 * most)


def _by_weights(step: StepOfJob, losses: Losses, zeros: tuple[bool, ...], weights: list[float]) -> tuple[str, str, str]:
    whole, passes = sum(weights), sum(losses.shares)
    shown = _numbers(weights)
    empty = [rank for rank, each in enumerate(losses.ranks) if not all(map(math.isfinite, filter(None, each)))]
    if empty:
        return (
            "count",
            f"the loss of rank {empty[0]} is no number: it is divided by a count, which is 0 for that rank's samples",
            "lockstep.mean(total, count)",
        )
    if sum(abs(each) > 1e-6 for each in weights) == 1 and not any(zeros):
        return (
            "extreme",
            f"one rank's loss makes the whole gradient of one process (weights {shown}): the loss takes one value out "
            "of the batch, such as a maximum or median, or is cut off",
            "lockstep.all_gather(values) before max() or median()",
        )
    tolerance = max(1e-9, 100 * step.precision, step.rounding)
    times = next((each for each in (1, len(step.ranks)) if _close(whole * each, passes, tolerance)), 0)
    is_mean = times > 0 and all(each >= -1e-6 for each in weights)
    if all(_close(loss, one, max(1e-5, step.rounding)) for loss, one in _pairs(losses)):
        return _NOT_LINEAR  # it is divided by itself
    if is_mean and _is_weighted(losses, weights, 100 * tolerance):
        shown = _numbers([each * times for each in weights])
        multiplied = "" if times == 1 else f", and multiplied by the number of ranks, {times}"
        return (
            "count",
            f"the ranks' losses weigh {shown} in one process, and their samples {_numbers(losses.shares)}: the loss is "
            "divided by a count that ranks have more or less of (tokens, a mask, a selection, weights of classes)"
            + multiplied,
            "lockstep.mean(total, count)" + (", and leave the number of ranks out" if multiplied else ""),
        )
    if step.number > 1 and _is_first_odd(step):
        return _KEPT
    odd = f"the ranks' losses would have to weigh {shown}, which add up to {whole:.6g} and not to {passes:.4g}"
    if is_mean and times == 1:
        odd = f"the ranks' gradients weigh {shown} in that of one process, and their losses do not"
    return (
        "function-of-mean",
        f"{odd}: the loss is a function of a mean over the batch (a root, a logarithm, a ratio, a threshold), or of a "
        "number of the rank's own rows",
        "take the mean of all ranks first: lockstep.mean(total, count), and then the function of it",
    )
