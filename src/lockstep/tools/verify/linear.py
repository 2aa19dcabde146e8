"""Explains a gradient that differs from one process's although outputs are equal, by its fit to the ranks'.

[Note: as a sum of the ranks'] The ranks compute gradients of their own losses. The gradient of a loss that is a mean
over samples is the mean of those, weighted by the ranks' numbers of samples. If the gradient of one process is a sum
with other weights, these show the divisor of the loss: none (a sum), counts of something other than samples (tokens, a
mask, class weights), or something that is not a count (a root, a logarithm, a maximum). If it is no such sum, the loss
compares samples with each other, or uses a statistic of them.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

from lockstep.tools.verify.causes import describe_draws, unlike_draws
from lockstep.tools.verify.compare import Fit
from lockstep.tools.verify.step import Losses, StepOfJob, each_step
from lockstep.tools.verify.words import Difference

__all__ = ["read_gradients"]

_CLOSE = 1e-3
_MAY_BE_DRAWN = ("not-linear", "extreme", "kept-state", "function-of-mean", "threshold")
# A key of the table in `words.py`, and values for its placeholders.
_Cause = tuple[str, dict[str, Any]]


def _close(a: float, b: float, tolerance: float = _CLOSE, least: float = 1e-12) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b), least)


def _are_close(a: Sequence[float], b: Sequence[float]) -> bool:
    return len(a) == len(b) and all(_close(x, y, 1e-2, 0.1) for x, y in zip(a, b, strict=True))


def _have_one_ratio(a: Sequence[float], b: Sequence[float], tolerance: float = _CLOSE) -> bool:
    ratios = [x / y for x, y in zip(a, b, strict=True) if abs(y) > 1e-9]
    return bool(ratios) and all(_close(each, ratios[0], tolerance) for each in ratios)


def _numbers(values: Sequence[float | None], digits: int = 4) -> str:
    return ", ".join(f"{value:.{digits}g}" for value in values if value is not None)


def _weights_and_shares(weights: Sequence[float], shares: Sequence[float]) -> dict[str, str]:
    """Both, with enough digits to differ."""
    texts = [{"weights": _numbers(weights, each), "shares": _numbers(shares, each)} for each in (4, 8, 12)]
    return next((each for each in texts if each["weights"] != each["shares"]), texts[0])


def _factor(value: float) -> str:
    """Format with enough digits to differ from 1: after clipping by norm, only the 1e-6 that it adds shows a factor."""
    texts = [f"{value:.{digits}g}" for digits in (4, 8, 12)]
    return next((text for text in texts if text != "1"), "1")


def read_gradients(step: StepOfJob) -> Difference | None:
    """Gradients that differ although all outputs are equal. See [Note: as a sum of the ranks']."""
    gradients, losses, padded = step.gradients, step.losses, step.padded
    if not gradients.used.names:
        return None
    stage = "gradients" if losses.are("weighted", step.tolerance) or losses.are("sum", step.tolerance) else "loss"
    measured = _measured(step)
    # Each rank's weight in the average: its share of the samples with Lockstep's engine, else 1/N.
    weighs = any(each["own"] for each in step.facts["engines"])
    given = losses.weights if weighs else [1 / len(step.ranks)] * len(losses.weights)
    needed, taken = _weights(gradients.needed, given, 1.0), _weights(gradients.taken, given, gradients.scale)
    averaging = ("after-averaging", {}) if gradients.were_alike else _averaging(step, needed, taken, given)
    if averaging is not None:
        return step.found("gradients", averaging[0], measured, **averaging[1])
    if padded and _is_over_lengths(step, needed):
        return step.found(stage, "padding", f"{measured}; {padded} samples were padded to another length")
    cause, values = _meaning(step, needed, taken, given)
    drawn, _ = unlike_draws(step)
    if drawn and cause in _MAY_BE_DRAWN:
        other = step.found(stage, cause, measured, **values)
        measured = f"{measured}; {describe_draws(drawn)}"
        return step.found(stage, "drawn", measured, meaning=other.meaning, advice=other.advice)
    cause += _where(step, stage) if cause == "not-linear" else ""
    return step.found(stage, cause, measured, **values)


def _where(step: StepOfJob, stage: str) -> str:
    """The end of the key of words for a loss that is not linear."""
    if stage == "gradients":
        return " gradients"
    return " later" if _comes_later(step) else ""


def _is_over_lengths(step: StepOfJob, needed: list[float] | None) -> bool:
    """Whether a loss may be a mean over padded lengths: its weight is right where samples are longest, else lower."""
    pairs = zip(needed or (), step.losses.shares, strict=False)
    return needed is None or _close(max(each / share for each, share in pairs if share), 1.0, step.tolerance)


def _measured(step: StepOfJob) -> str:
    gradients, losses, used = step.gradients, step.losses, step.gradients.used
    text = "the outputs are the same"
    if not any(call["outputs"] is not None for call in step.one["calls"]):
        text = "no output has one row per sample"
    elif step.padded:
        text = "outputs of samples padded to different lengths are not compared"
    ones = _numbers(losses.one)
    text += f"; loss of one process {ones}, of the ranks " if ones else "; backward() was not called"
    if ones:
        text += "; ".join(map(_numbers, losses.ranks))
        for how, words in (("weighted", "their weighted mean"), ("sum", "their sum")):
            found = losses.sums(how)
            text += "" if found is None else f" ({words} {found[1]:.6g})"
    if gradients.factor is not None and not _close(gradients.factor, 1.0, step.tolerance):
        return text + f"; the gradient of every parameter is {_factor(gradients.factor)} times that of one process"
    if len(used.names) < used.count:
        text += f"; the gradients of {len(used.names)} of {used.count} parameters differ"
        return text + f", by up to {used.worst:.1e}"
    return text + f"; the gradients differ by up to {used.worst:.1e}, by no common factor"


# ---- weights -----------------------------------------------------------------------------------------


def _weights(fit: Fit, given: list[float], scale: float | None) -> list[float] | None:
    """The weight of each rank's loss in a gradient; None if the gradient is not a sum of the ranks'.

    The gradients in `fit` were recorded after Lockstep's engine had weighted the losses in proportion to `given`; an
    optimizer uses `scale` times the gradient that was computed.
    """
    if not fit.is_good or not scale or len(given) != len(fit.factors):
        return None
    count = round(len(given) / sum(given)) if sum(given) else 1
    return [count * factor * weight / scale for factor, weight in zip(fit.factors, given, strict=True)]


def _averaging(
    step: StepOfJob, needed: list[float] | None, taken: list[float] | None, given: list[float]
) -> _Cause | None:
    """The fault in the averaging, if one process's loss is the mean over samples of the ranks'."""
    losses = step.losses
    if not needed or not _are_close(needed, losses.shares):
        return None
    if taken is None or not (_are_close(taken, given) or _have_one_ratio(taken, needed)):
        return _before_averaging(taken)
    if all(map(_close, given, losses.shares)):  # both are exact
        return None
    rows = ", ".join(str(row) for each in losses.rows for row in each)
    return _uneven(step), {"rows": rows, "given": _numbers(given)}


def _uneven(step: StepOfJob) -> str:
    """The key for ranks that are weighted by other than their numbers of samples."""
    if any(each["weighed"] for ranks in step.ranks for each in ranks["backwards"]):
        return "uneven means"
    if not any(each["own"] for each in step.facts["loaders"]):
        return "uneven"
    return "uneven loader" if any(each["own"] for each in step.facts["engines"]) else "uneven engine"


def _before_averaging(taken: list[float] | None) -> _Cause:
    used = [rank for rank, each in enumerate(taken or ()) if abs(each) > 1e-6]
    return ("before-averaging one", {"rank": used[0]}) if len(used) == 1 else ("before-averaging", {})


def _meaning(step: StepOfJob, needed: list[float] | None, taken: list[float] | None, given: list[float]) -> _Cause:
    """The reason why a loss is not a mean over samples."""
    losses, is_always = step.losses, not _comes_later(step)
    if not any(each["backwards"] for each in step.ranks):
        factor = step.gradients.factor
        return ("not-linear unseen", {}) if factor is None else ("factor", {"factor": _factor(factor)})
    if (
        is_always
        and losses.are("sum", max(1e-6, step.rounding))
        and not losses.are("weighted", max(1e-3, step.rounding))
    ):
        return "sum", {}
    is_whole = _have_one_loss(step) is False
    if is_whole and (needed is None or len(set(losses.shares)) > 1):
        return "whole-batch", {}
    if needed is None:
        return _without_weights(step, given)
    factor = _common_factor(step, needed, taken) if is_always else None
    if factor is None:
        return _by_weights(step, needed)
    if _close(factor * len(step.ranks), 1.0, max(_CLOSE, step.rounding)):
        return "whole-batch" if is_whole else "sum", {}
    return "factor", {"factor": _factor(factor)}


def _without_weights(step: StepOfJob, given: list[float]) -> _Cause:
    """`_meaning`, if one process's gradient is not a weighted sum of the ranks'."""
    zeros = step.gradients.zeros
    if any(zeros):
        return "threshold", {"who": "one process" if zeros[-1] else "a rank"}
    return _count_of_part(step, given) or ("kept-state" if _is_kept(step) else "not-linear", {})


def _count_of_part(step: StepOfJob, given: list[float]) -> _Cause | None:
    """The cause if one of several terms is divided by a count, as shown by parameters that no other term reaches."""
    shares, found = step.losses.shares, dict[str, list[float]]()
    for name, fit in step.gradients.needed_by.items():
        weights = _weights(fit, given, 1.0)
        if weights and min(weights) > 0 and _close(sum(weights), sum(shares), 1e-2) and not _are_close(weights, shares):
            found[step.one["names"][name]] = weights
    if not found:
        return None
    words = _weights_and_shares(next(iter(found.values())), shares)
    key = "count of a part later" if _comes_later(step) else "count of a part"
    return key, {"names": ", ".join([*found][:3]), **words}


def _common_factor(step: StepOfJob, needed: list[float], taken: list[float] | None) -> float | None:
    """How many times its correct weight each rank has, in the passes that are wrong; None if that differs."""
    counted = taken if taken is not None else [1 / len(step.ranks)] * len(needed)
    tolerance = max(min(_CLOSE, step.gradients.needed.unsure), step.rounding)
    pairs, passes = list(zip(needed, counted, strict=True)), len(needed) // len(step.ranks)
    by_pass = (pairs[number::passes] for number in range(passes))
    wrong = [each for each in by_pass if not all(_close(*one, tolerance) for one in each)] or [pairs]
    ones, others = zip(*itertools.chain(*wrong), strict=True)
    return others[0] / ones[0] if all(others) and _have_one_ratio(ones, others, tolerance) else None


def _have_one_loss(step: StepOfJob) -> bool | None:
    """Whether losses that are equal on all ranks, and in this step in one process, are constant; None if unequal."""
    first, *others = (
        [loss for each in ranks["steps"] for one in each["backwards"] for loss in one["losses"]]
        for ranks in step.runs.ranks
    )
    here = [step.losses.one] * len(step.ranks)
    pairs = [*zip(step.losses.ranks, here, strict=True), *((first, each) for each in others)]
    if not all(_are_one(*each, step.rounding) for each in pairs):
        return None
    return _are_one(first, first[:1] * len(first), step.rounding)


def _are_one(a: Sequence[float | None], b: Sequence[float | None], rounding: float) -> bool:
    pairs = zip(a, b, strict=False)
    return all(x is not None and y is not None and _close(x, y, max(1e-5, rounding)) for x, y in pairs)


def _is_kept(step: StepOfJob) -> bool:
    """Whether all earlier steps match one process, but no later one: kept state that differs remains different."""
    after = itertools.islice(each_step(step.runs), step.number, None)
    return _comes_later(step) and all(each.gradients.used.names for each in after)


def _comes_later(step: StepOfJob) -> bool:
    """Whether an earlier step, all of which matched one process, had batches of the same sizes on the ranks."""
    *before, now = (
        [batch["rows"] for ranks in step.runs.ranks for batch in ranks["steps"][number]["batches"]]
        for number in range(step.number)
    )
    return bool(now) and now in before


def _by_weights(step: StepOfJob, weights: list[float]) -> _Cause:
    losses, shown = step.losses, _numbers(weights)
    empty = [rank for rank, each in enumerate(losses.ranks) if not all(map(math.isfinite, filter(None, each)))]
    if empty:
        return "count zero", {"rank": empty[0]}
    if sum(abs(each) > 1e-6 for each in weights) == 1 and not any(step.gradients.zeros):
        return "extreme", {"weights": shown}
    if _have_one_loss(step):
        return "not-linear", {}  # it is divided by itself
    times = _times_a_mean(step, weights)
    if times and _is_weighted(losses, weights, 100 * step.tolerance):
        words = _weights_and_shares([each * times for each in weights], losses.shares)
        return "count" if times == 1 else "count times", words
    if _is_kept(step):
        return "kept-state", {}
    odd = f"in one process's gradient, the ranks' losses have the weights {shown}, with sum {sum(weights):.6g} "
    odd += f"instead of {sum(losses.shares):.4g}"
    if times == 1:
        odd = f"one process's gradient is the mean of the ranks' with the weights {shown}, but its loss is not (if "
        odd += "losses were reduced in place before backward(), the loss is divided by a count)"
    return "function-of-mean", {"odd": odd}


def _times_a_mean(step: StepOfJob, weights: list[float]) -> int:
    """The factor in the ranks' losses, of which one process has a weighted mean: 1 or the number of ranks; else 0."""
    passes = sum(step.losses.shares)
    times = next((each for each in (1, len(step.ranks)) if _close(sum(weights) * each, passes, step.tolerance)), 0)
    return times if all(each >= -1e-6 for each in weights) else 0


def _is_weighted(losses: Losses, weights: list[float], tolerance: float) -> bool:
    """Whether one process's loss, too, is the ranks' mean with these weights, unlike a logarithm of a mean."""
    if len(losses.values) != len(weights) or None in (*losses.values, *losses.one):
        return True
    theirs, one = [value or 0.0 for value in losses.values], sum(filter(None, losses.one))
    mean = sum(map(operator.mul, weights, theirs))
    spread, most = max(theirs) - min(theirs), max(abs(each) for each in (one, *theirs))
    return bool(abs(mean - one) <= tolerance * spread + tolerance / 100 * most)
