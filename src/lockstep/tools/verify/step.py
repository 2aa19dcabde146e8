"""One step of the ranks and of one process, in a form that can be compared, with its measurements."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.tools.verify.compare import (
    MOST_REST,
    TIMES_NOISE,
    Tensors,
    Values,
    distances,
    far,
    fit_ranks,
    limit_of,
    measure_values,
    noise_of_rounding,
    relative,
)
from lockstep.tools.verify.samples import Calls, Record, Samples, calls_of, entered, measure_calls
from lockstep.tools.verify.words import Difference, difference

__all__ = [
    "Gradients",
    "Losses",
    "Runs",
    "StepOfJob",
    "counted",
    "distance_of_gradients",
    "each_step",
    "parameters_of",
    "with_means",
]

_SINGLE, _DOUBLE = 2.0**-23, 2.0**-52  # the eps of float32 and float64
# Relative differences of a gradient, and of an optimizer's change, that may be one process's up to rounding; some
# optimizers (Muon) compute a change in 16 bits from gradients in 32.
_OWNED, _OWNED_CHANGE = 1e-3, 0.3
# Minimal number of elements per rank of a parameter whose gradient alone may show the divisor of a loss.
_TIMES_UNKNOWNS = 4
# The script's action at each stage, whose lines are reported.
_EVENTS = {
    "samples": "batch",
    "inputs": "call",
    "outputs": "call",
    "buffers": "call",
    "loss": "backward",
    "gradients": "backward",
    "parameters": "step",
}


def counted(count: int, word: str) -> str:
    """`1 sample`, `2 samples`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def parameters_of(step: Record, when: str) -> dict[int, Any]:
    """The record of each parameter, by its position in the optimizer: "begin", "after", "used" or "end"."""
    return dict(enumerate(step[when]))


# ---- losses ------------------------------------------------------------------------------------------


class Losses:
    """What backward() was called on.

    Attributes:
        one: losses of one process, one per backward pass; None for a loss that is not a single number.
        ranks: losses of each rank.
        values: the ranks' losses in one list, rank by rank.
        rows: number of samples of each rank, per backward pass.
        shares: their fraction of all ranks' samples in the same pass; rank by rank.
        weights: weight of each rank's backward passes in a correct average; rank by rank.
    """

    def __init__(self, ranks: Sequence[Record], one: Record) -> None:
        self.one, *self.ranks = (
            [None if None in each["losses"] else sum(each["losses"]) for each in step["backwards"]]
            for step in (one, *ranks)
        )
        self.values = [value for each in self.ranks for value in each]
        self.rows = [[_rows_of(step, each) for each in step["backwards"]] for step in ranks]
        totals = [sum(each) or 1 for each in zip(*self.rows, strict=False)]
        self.shares = [row / total for each in self.rows for row, total in zip(each, totals, strict=False)]
        self.weights = [_weight_of(step, each, len(ranks)) for step in ranks for each in step["backwards"]]

    def sums(self, how: str) -> tuple[float, float] | None:
        """(one process's loss, the ranks' combined loss) over all backward passes.

        Args:
            how: "weighted" by samples, or "sum".
        """
        if any(len(each) != len(self.one) for each in self.ranks) or None in (*self.values, *self.one):
            return None
        weights = self.shares if how == "weighted" else [float(share > 0) for share in self.shares]
        return sum(filter(None, self.one)), sum(map(operator.mul, weights, self.values))

    def are(self, how: str, tolerance: float) -> bool:
        """Whether one process's loss equals the ranks' combined loss."""
        found = self.sums(how)
        return found is not None and abs(found[0] - found[1]) <= tolerance * max(abs(found[0]), abs(found[1]), 1e-30)


def _batch_of(step: Record, backward: Record) -> Record | None:
    """The batch that a backward pass was for."""
    return step["batches"][backward["batch"]] if 0 <= backward["batch"] < len(step["batches"]) else None


def _rows_of(step: Record, backward: Record) -> int:
    batch = _batch_of(step, backward)
    if batch is None:
        return sum(call["count"] for call in calls_of(step)) or 1
    return 0 if batch["filler"] else int(batch["rows"])


def _weight_of(step: Record, backward: Record, world_size: int) -> float:
    """The weight of a backward pass's mean loss in the average: by its loader's share, else 1/N."""
    batch = None if backward["weighed"] else _batch_of(step, backward)
    return 1 / world_size if batch is None or batch["weight"] is None else float(batch["weight"])


# ---- gradients ---------------------------------------------------------------------------------------


class Gradients:
    """The gradients computed in a step, and those that the optimizers used.

    Attributes:
        between: distance of the optimizers' gradients between rank 0 and the rank that differs most.
        used: distance of the gradients that rank 0's optimizer used from one process's.
        factor: ratio of rank 0's to one process's; None if there is no common factor.
        were_alike: whether rank 0's were equal to one process's when backward() returned.
        are_made_up: whether rank 0's were then a multiple, but the optimizers used equal ones: clipping hides a factor.
        needed: fit of one process's gradient to the ranks'; see [Note: as a sum of the ranks'] in linear.py.
        needed_by: the same for each parameter that has several elements per backward pass.
        taken: fit of the gradient that rank 0's optimizer used to the same.
        scale: ratio of used to computed gradients in one process (clipped, unscaled); None if there is none.
        zeros: for each backward pass, the ranks' and then one process's, whether it left only zeros.
    """

    def __init__(self, ranks: Sequence[Record], one: Record, again: Record | None, precision: float) -> None:
        own, first, *others = (parameters_of(step, "used") for step in (one, *ranks))
        sizes = (value[:-1].abs().max() for value in own.values() if value is not None and value.numel() > 1)
        # Numbers up to this size are rounding of others. In float64, generously: sums may cancel by many digits.
        least = max(100 * precision, min(precision, _DOUBLE) * 1e7) * max(map(float, sizes), default=0.0)
        moved = {} if again is None else distances(own, parameters_of(again, "used"), least)
        rounded = noise_of_rounding(one)
        noise = {name: max(rounded, moved.get(name, 0.0)) for name in own}

        def compared(a: Tensors, b: Tensors) -> Values:
            return measure_values(a, b, precision, noise, least)

        between = [compared(first, other) for other in others]
        self.between = max(between, key=lambda each: (len(each.names), each.worst), default=Values())
        self.used = compared(first, own)
        left, own_left = (parameters_of(step, "after") for step in (ranks[0], one))
        self.were_alike = any(each is not None for each in one["after"]) and not compared(left, own_left).names
        most = max(1e4 * max(precision, 1e-12), TIMES_NOISE * rounded)
        self.factor = _common_factor(first, own, most)
        self.are_made_up = bool(not self.used.names and not self.were_alike and _common_factor(left, own_left, most))
        self._fit(ranks, one, again, precision)

    def _fit(self, ranks: Sequence[Record], one: Record, again: Record | None, precision: float) -> None:
        total = _total(one)
        whole = _flat(total, total)
        passes = [each["local"] for step in ranks for each in step["backwards"]]
        parts = [_flat(each, total) for each in passes]
        moved = 0.0 if again is None else relative(whole, _flat(_total(again), total))
        rounding = max(1e-9, 100 * precision, TIMES_NOISE * moved)
        rounding = max(min(MOST_REST, rounding), TIMES_NOISE * noise_of_rounding(one))
        taken, own_taken = (_flat(parameters_of(step, "used"), total) for step in (ranks[0], one))
        uncut = _below_limits([taken, own_taken], len(parts))
        self.needed = fit_ranks(whole, parts, rounding, 1 / len(ranks))
        self.needed_by = {
            name: fit_ranks(value[:-1], [_flat(each, {name: value}) for each in passes], rounding)
            for name, value in total.items()
            if not self.needed.is_good and value.numel() > _TIMES_UNKNOWNS * len(parts)
        }
        self.scale = fit_ranks(own_taken[uncut], [whole[uncut]], rounding).factor
        self.taken = fit_ranks(taken[uncut], [each[uncut] for each in parts], rounding, (self.scale or 0) / len(ranks))
        self.zeros = [not bool(each.any()) for each in (*parts, whole)]


def _common_factor(a: Tensors, b: Tensors, rounding: float) -> float | None:
    """The ratio of all tensors in `a` to those in `b`; None if it is not common to all."""
    both = {name: value for name, value in b.items() if value is not None and a.get(name) is not None}
    return fit_ranks(_flat(a, both), [_flat(b, both)], rounding).factor


def _total(step: Record) -> dict[int, Tensor]:
    """The sum of the gradients of all backward passes."""
    total: dict[int, Tensor] = {}
    for each in step["backwards"]:
        for name, value in each["local"].items():
            total[name] = total[name] + value if name in total else value
    return total


def _flat(values: Tensors, like: Mapping[Any, Tensor]) -> Tensor:
    """The values of the tensors in `like`, without the norms, which do not add up."""
    parts = []
    for name, shape in like.items():
        value = values.get(name)
        parts.append(torch.zeros_like(shape[:-1]) if value is None or value.shape != shape.shape else value[:-1])
    return torch.cat(parts) if parts else torch.zeros(0)


def _below_limits(gradients: Sequence[Tensor], unknowns: int) -> Tensor:
    """Which values were not clipped: clipping by value leaves several with exactly the largest magnitude."""
    uncut = torch.ones_like(gradients[0], dtype=torch.bool)
    for each in gradients:
        cut = each.abs() == each.abs().max() if each.numel() else uncut
        uncut &= ~cut if int(cut.sum()) > 1 else True
    return uncut if int(uncut.sum()) > unknowns else torch.ones_like(uncut)


def distance_of_gradients(one: Record, again: Record) -> float:
    """The relative difference of the gradients of a second run: all together, up to a common factor.

    Together, because one tensor may be only rounding, such as that of a bias before a batch norm.
    """
    own = {name: value for name, value in parameters_of(one, "used").items() if value is not None}
    return fit_ranks(_flat(own, own), [_flat(parameters_of(again, "used"), own)]).rest


# ---- the step ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """The records of all runs: `steps`, and the `facts` of the whole run.

    Attributes:
        ranks: records of the ranks.
        one: record of one process.
        again: record of one process's second run, with halved sums; None if that did not run.
        moved: record of one process that evaluated rank 0's batches; None if that did not run.
    """

    ranks: Sequence[Record]
    one: Record
    again: Record | None = None
    moved: Record | None = None


@dataclass(frozen=True)
class StepOfJob:
    """One step, of the ranks and of one process.

    Attributes:
        number: number of the step, from 1.
        runs: the runs that it belongs to.
        ranks: records of the step on the ranks.
        one: record of the step in one process.
        again: the same with halved sums, or None.
    """

    number: int
    runs: Runs
    ranks: tuple[Record, ...]
    one: Record
    again: Record | None

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts of rank 0's whole run."""
        facts: Mapping[str, Any] = self.runs.ranks[0]["facts"]
        return facts

    @functools.cached_property
    def moved(self) -> Calls:
        """How far the inputs and outputs of the models are moved in one process's second run."""
        return Calls() if self.again is None else measure_calls([self.again], self.one, limit_of(0.0, self.precision))

    @property
    def noise(self) -> float:
        """The effect of rounding on outputs."""
        return max(noise_of_rounding(self.one), min(self.moved.outputs, 1.0))

    @property
    def precision(self) -> float:
        """The precision of the arithmetic; that of 16-bit numbers counts as noise instead."""
        return _SINGLE if self.one["single"] else min(float(self.one["precision"]), _SINGLE)

    @property
    def rounding(self) -> float:
        """The relative difference up to which outputs, and values computed from them, count as equal."""
        return TIMES_NOISE * self.noise

    @property
    def tolerance(self) -> float:
        """The same for losses, and for the weights of ranks in a gradient."""
        return max(1e-9, 100 * self.precision, self.rounding)

    @functools.cached_property
    def samples(self) -> Samples:
        """The samples of the step."""
        return Samples(self.ranks, self.one)

    @property
    def padded(self) -> int:
        """Number of samples that differ only in padding, in the step's batches, else in its models' inputs."""
        return self.samples.padded or self.calls.padded

    @functools.cached_property
    def is_cut_otherwise(self) -> bool:
        """Whether one process takes the same rows in other backward passes, as if N ranks accumulate over fewer."""
        passes = {len(each["backwards"]) for each in self.ranks}
        if len(passes) > 1 or len(self.one["backwards"]) in passes or self.samples.differ:
            return False
        batches = len(self.one["batches"])
        return all(len(each["batches"]) != batches for each in self.ranks) if batches else self.has_same_rows

    @functools.cached_property
    def has_same_rows(self) -> bool:
        """Whether the same rows enter models, in any of their calls."""
        return entered(self.one) == entered(*self.ranks)

    @functools.cached_property
    def calls(self) -> Calls:
        """The inputs and outputs of the models, pass by pass."""
        are_others = any(len(each["calls"]) != len(self.one["calls"]) for each in self.ranks)
        if self.is_cut_otherwise or (are_others and self.has_same_rows):
            return Calls()
        return measure_calls(self.ranks, self.one, limit_of(self.noise, self.precision), self.samples.padded > 0)

    @functools.cached_property
    def others(self) -> Calls:
        """The same for calls that do not train, such as of a teacher."""
        ranks, one = ([{**each, "calls": each["others"]} for each in steps] for steps in (self.ranks, [self.one]))
        if self.is_cut_otherwise or any(len(each["calls"]) != len(one[0]["calls"]) for each in ranks):
            return Calls()
        return measure_calls(ranks, one[0], limit_of(self.noise, self.precision), self.samples.padded > 0)

    @functools.cached_property
    def losses(self) -> Losses:
        """What backward() was called on."""
        return Losses(self.ranks, self.one)

    @functools.cached_property
    def gradients(self) -> Gradients:
        """The gradients computed, and those that the optimizer used."""
        return Gradients(self.ranks, self.one, self.again, self.precision)

    def is_far(self, relative: float) -> bool:
        """Whether a relative difference is more than rounding."""
        return far(relative, limit_of(self.noise, self.precision))

    def found(self, stage: str, key: str, measured: str, **values: Any) -> Difference:
        """A difference of this step; see `difference`."""
        events = self.ranks[0]["lines"]
        lines = events.get(_EVENTS.get(stage, "")) or events.get("call") or events.get("step", ())
        return difference(self.number, stage, key, measured, tuple(lines), **values)


def each_step(runs: Runs) -> Iterator[StepOfJob]:
    """The steps that the ranks and one process took."""
    for number, steps in enumerate(zip(runs.one["steps"], *(each["steps"] for each in runs.ranks), strict=False)):
        again = [] if runs.again is None else runs.again["steps"][number : number + 1]
        ranks = _with_owners(steps[1:], steps[0], [_next_step(each, number) for each in runs.ranks])
        ranks, others = with_means(ranks, [steps[0], *again])
        own, *then = _of_one_root(_without_overflow([others[0], *ranks, *others[1:]]))
        own_again = then.pop() if again else None
        yield StepOfJob(number + 1, runs, tuple(then), own, own_again)


def with_means(ranks: Sequence[Record], others: Sequence[Record] = ()) -> tuple[list[Record], list[Record]]:
    """Steps of ranks and of others; if an optimizer averages within its step, `used` becomes the ranks' mean.

    Such an optimizer leaves each rank its own gradients, but moves all parameters alike. Norms cannot be averaged and
    are set to 0.
    """

    def flat(step: Record, when: str) -> Tensor:
        return _flat(parameters_of(step, when), parameters_of(ranks[0], "begin"))

    def with_used(step: Record, gradients: Iterable[Tensor | None]) -> Record:
        return {**step, "used": [None if one is None else torch.cat([one[:-1], one.new_zeros(1)]) for one in gradients]}

    (used, *own), (end, *ends) = ([flat(each, when) for each in ranks] for when in ("used", "end"))
    are_own, are_apart = any(not each.equal(used) for each in own), any(not each.equal(end) for each in ends)
    if not are_own or are_apart or end.equal(flat(ranks[0], "begin")):
        return [*ranks], [*others]
    places = zip(*(each["used"] for each in ranks), strict=False)
    means = [None if any(one is None for one in each) else torch.stack(each).mean(0) for each in places]
    return [with_used(each, means) for each in ranks], [with_used(each, each["used"]) for each in others]


def _next_step(run: Record, number: int) -> Record | None:
    """The next step of the same optimizer."""
    first, *later = run["steps"][number:]
    return next((each for each in later if each["optimizer"] == first["optimizer"]), None)


def _with_owners(ranks: Sequence[Record], one: Record, later: Sequence[Record | None]) -> Sequence[Record]:
    """Steps of ranks that each step a part of the parameters, with the owners' `used` and `end` on all ranks.

    The owner of a parameter has one process's gradient and result, which the others have when their next step begins
    (ZeRO-2). If any parameter differs without an owner, the steps are returned unchanged.
    """
    found = {what: [[*each[what]] for each in ranks] for what in ("used", "end")}
    for place in range(len(one["used"])):
        gradients = [each["used"][place] for each in ranks]
        if all(_are_equal(gradients[0], each) for each in gradients):
            continue
        owner = next((rank for rank, each in enumerate(ranks) if _is_owner(each, one, later, place)), None)
        if owner is None:
            return ranks
        for what, values in found.items():
            for each in values:
                each[place] = ranks[owner][what][place]
    return [{**each, "used": found["used"][rank], "end": found["end"][rank]} for rank, each in enumerate(ranks)]


def _is_owner(step: Record, one: Record, later: Sequence[Record | None], place: int) -> bool:
    """Whether a rank's gradient and change of a parameter are one process's, and all ranks continue with the result."""
    (gradient, own), (end, own_end) = ([each[what][place] for each in (step, one)] for what in ("used", "end"))
    if gradient is None or own is None or relative(gradient, own) >= _OWNED:
        return False
    begin = one["begin"][place]
    then = [each["begin"][place] for each in later if each is not None]
    is_change = relative(end - begin, own_end - begin) < _OWNED_CHANGE
    return is_change and all(relative(each, end) < _SINGLE for each in then)


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    return b is None if a is None else b is not None and a.equal(b)


def _without_overflow(steps: list[Record]) -> list[Record]:
    """A step without the backward passes that overflowed in any process, which a GradScaler discards."""
    if len({len(each["backwards"]) for each in steps}) > 1:
        return steps
    passes = zip(*(each["backwards"] for each in steps), strict=True)
    finite = [all(bool(value.isfinite().all()) for one in each for value in one["local"].values()) for each in passes]
    if not any(finite):
        return steps
    return [{**each, "backwards": list(itertools.compress(each["backwards"], finite))} for each in steps]


def _of_one_root(steps: list[Record]) -> list[Record]:
    """Steps without the records of model calls, if different models were called.

    Lightning's Trainer wraps a module on several ranks, and calls its parts on one process.
    """
    roots = [[call["name"] for call in each["calls"]] for each in steps]
    is_other = any(len(each) == len(roots[0]) and each != roots[0] for each in roots)
    return [{**each, "calls": []} for each in steps] if is_other else steps
