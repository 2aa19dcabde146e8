"""One step of the ranks and of one process, in a form that can be compared, and what was measured of it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.tools.verify.compare import (
    MOST_REST,
    TIMES_NOISE,
    Fit,
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
from lockstep.tools.verify.samples import Calls, Record, Samples, calls_of, measure_calls, measure_samples
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
]

_SINGLE = 2.0**-23  # the eps of float32
# What the script does at each stage, whose lines are told.
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


def parameters_of(step: Record, when: str) -> dict[str, Any]:
    """What was recorded of each parameter of the optimizer, by its place and name: "begin", "used" or "end"."""
    return {f"{place}:{name}": value for place, (name, value) in enumerate(zip(step["names"], step[when], strict=True))}


# ---- losses ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Losses:
    """What backward() was called on.

    Attributes:
        one: of one process, a number for each backward pass.
        ranks: of each rank.
        rows: samples of each rank, for each backward pass.
        weights: how much each rank's backward passes count where ranks are averaged as they should be; rank by rank.
    """

    one: tuple[float | None, ...]
    ranks: tuple[tuple[float | None, ...], ...]
    rows: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]

    @property
    def values(self) -> list[float | None]:
        """The ranks' losses, rank by rank."""
        return [value for each in self.ranks for value in each]

    @property
    def shares(self) -> list[float]:
        """Samples of each rank's backward passes, among those of all ranks in the same pass; rank by rank."""
        totals = [sum(each) or 1 for each in zip(*self.rows, strict=False)]
        return [row / total for each in self.rows for row, total in zip(each, totals, strict=False)]

    def sums(self, how: str) -> tuple[float, float] | None:
        """(one process's loss, what the ranks' make) over all backward passes.

        Args:
            how: "weighted" by samples, or "sum".
        """
        values, shares = self.values, self.shares
        if any(len(each) != len(self.one) for each in self.ranks) or None in (*values, *self.one):
            return None
        weights = shares if how == "weighted" else [float(share > 0) for share in shares]
        return sum(filter(None, self.one)), sum(map(operator.mul, weights, (value or 0.0 for value in values)))

    def are(self, how: str, tolerance: float) -> bool:
        """Whether one process's loss is what the ranks' make."""
        found = self.sums(how)
        return found is not None and abs(found[0] - found[1]) <= tolerance * max(abs(found[0]), abs(found[1]), 1e-30)


def _measure_losses(ranks: Sequence[Record], one: Record) -> Losses:
    return Losses(
        one=_losses_of(one),
        ranks=tuple(map(_losses_of, ranks)),
        rows=tuple(tuple(_rows_of(step, each) for each in step["backwards"]) for step in ranks),
        weights=tuple(_weight_of(step, each, len(ranks)) for step in ranks for each in step["backwards"]),
    )


def _losses_of(step: Record) -> tuple[float | None, ...]:
    return tuple(None if None in each["losses"] else sum(each["losses"]) for each in step["backwards"])


def _batch_of(step: Record, backward: Record) -> Record | None:
    """The batch that a backward pass was for."""
    return step["batches"][backward["batch"]] if 0 <= backward["batch"] < len(step["batches"]) else None


def _rows_of(step: Record, backward: Record) -> int:
    batch = _batch_of(step, backward)
    if batch is None:
        return sum(call["count"] for call in calls_of(step)) or 1
    return 0 if batch["filler"] else int(batch["rows"])


def _weight_of(step: Record, backward: Record, world_size: int) -> float:
    """What averaging makes the mean loss of a backward pass count: by its loader's share, else one of N."""
    batch = None if backward["weighed"] else _batch_of(step, backward)
    return 1 / world_size if batch is None or batch["weight"] is None else float(batch["weight"])


# ---- gradients ---------------------------------------------------------------------------------------


class Gradients:
    """What was computed in a step, and what the optimizers took of it.

    Args:
        ranks: the step on each rank.
        one: the same of one process.
        again: of one process once more, or None.
        precision: of the arithmetic.
    """

    def __init__(self, ranks: Sequence[Record], one: Record, again: Record | None, precision: float) -> None:
        self._ranks, self._one, self._again, self._precision = ranks, one, again, precision
        self._rounded = noise_of_rounding(one)
        self._own, *self._theirs = (parameters_of(step, "used") for step in (one, *ranks))
        sizes = (value[:-1].abs().max() for value in self._own.values() if value is not None and value.numel() > 1)
        self._least = 100 * precision * max(map(float, sizes), default=0.0)  # numbers up to this are rounding of others
        moved = {} if again is None else distances(self._own, parameters_of(again, "used"), self._least)
        self._noise = {name: max(self._rounded, moved.get(name, 0.0)) for name in self._own}

    def _compared(self, a: Tensors, b: Tensors) -> Values:
        return measure_values(a, b, self._precision, self._noise, self._least)

    @functools.cached_property
    def between(self) -> Values:
        """Those that the optimizer took, of the rank that is furthest from rank 0."""
        first, *others = self._theirs
        found = (self._compared(first, each) for each in others)
        return max(found, key=lambda each: (len(each.names), each.worst), default=Values())

    @functools.cached_property
    def used(self) -> Values:
        """Those that rank 0's optimizer took, against one process."""
        return self._compared(self._theirs[0], self._own)

    @functools.cached_property
    def factor(self) -> float | None:
        """The ranks' gradients are one process's times this; None for no common factor."""
        first, own = self._theirs[0], self._own
        both = {name: value for name, value in own.items() if value is not None and first.get(name) is not None}
        most = max(1e4 * max(self._precision, 1e-12), TIMES_NOISE * self._rounded)
        return fit_ranks(_flat(first, both), [_flat(own, both)], most).factor

    @functools.cached_property
    def were_alike(self) -> bool:
        """Whether those of rank 0 were one process's when backward() returned."""
        left, own = _left(self._ranks[0]), _left(self._one)
        return bool(own) and not self._compared(left, own).names

    # As sums of what the ranks computed: see [Note: as a sum of the ranks'] in linear.py.

    @functools.cached_property
    def _total(self) -> dict[str, Tensor]:
        """What one process computed."""
        return _total_of(self._one)

    @functools.cached_property
    def _whole(self) -> Tensor:
        return _flat(self._total, self._total)

    @functools.cached_property
    def _parts(self) -> list[Tensor]:
        """What each backward pass of each rank computed."""
        return [_flat(each["local"], self._total) for step in self._ranks for each in step["backwards"]]

    @functools.cached_property
    def _rounding(self) -> float:
        again = None if self._again is None else _flat(_total_of(self._again), self._total)
        moved = 0.0 if again is None else relative(self._whole, again)
        least = max(1e-9, 100 * self._precision, TIMES_NOISE * moved)
        return max(min(MOST_REST, least), TIMES_NOISE * self._rounded)

    @functools.cached_property
    def _taken(self) -> list[Tensor]:
        """What the optimizers of rank 0 and of one process took."""
        return [
            _flat(dict(zip(step["names"], step["used"], strict=True)), self._total)
            for step in (self._ranks[0], self._one)
        ]

    @functools.cached_property
    def _uncut(self) -> Tensor:
        """Which numbers no clipping by value has cut: it leaves several with the size of the largest, exactly."""
        uncut = torch.ones_like(self._whole, dtype=torch.bool)
        for each in self._taken:
            cut = each.abs() == each.abs().max() if each.numel() else uncut
            uncut &= ~cut if int(cut.sum()) > 1 else True
        return uncut if int(uncut.sum()) > len(self._parts) else torch.ones_like(uncut)

    @functools.cached_property
    def needed(self) -> Fit:
        """One process's gradient out of what the ranks computed."""
        return fit_ranks(self._whole, self._parts, self._rounding)

    @functools.cached_property
    def taken(self) -> Fit:
        """The gradient that rank 0's optimizer took out of the same."""
        parts = [each[self._uncut] for each in self._parts]
        return fit_ranks(self._taken[0][self._uncut], parts, self._rounding)

    @functools.cached_property
    def scale(self) -> float | None:
        """What one process's optimizer took is what it computed times this (clipped, unscaled); None for neither."""
        return fit_ranks(self._taken[1][self._uncut], [self._whole[self._uncut]], self._rounding).factor

    @functools.cached_property
    def zeros(self) -> tuple[bool, ...]:
        """Of each rank's backward passes, whether it left nothing but zeros; of one process's last."""
        return tuple(not bool(each.any()) for each in (*self._parts, self._whole))


def _left(step: Record) -> dict[str, Tensor]:
    """What backward() left for the optimizer."""
    return {f"{place}:{name}": step["after"][name] for place, name in enumerate(step["names"]) if name in step["after"]}


def _total_of(step: Record) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for each in step["backwards"]:
        for name, value in each["local"].items():
            total[name] = total[name] + value if name in total else value
    return total


def _flat(values: Tensors, like: Mapping[str, Tensor]) -> Tensor:
    """Numbers of the tensors in `like`, but for the norms, which do not add up."""
    parts = []
    for name, shape in like.items():
        value = values.get(name)
        parts.append(torch.zeros_like(shape[:-1]) if value is None or value.shape != shape.shape else value[:-1])
    return torch.cat(parts) if parts else torch.zeros(0)


def distance_of_gradients(one: Record, again: Record) -> float:
    """The part of the gradients that a second run did not compute: all together, up to a common factor.

    Together, because one tensor may be made of rounding alone, such as the bias before a batch norm.
    """
    own = {name: value for name, value in parameters_of(one, "used").items() if value is not None}
    return fit_ranks(_flat(own, own), [_flat(parameters_of(again, "used"), own)]).rest


# ---- the step ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """The records of all runs: `steps`, and the `facts` of the whole run.

    Attributes:
        ranks: of each rank.
        one: of one process.
        again: of one process once more, with sums in reverse; None where that did not run.
        moved: of one process that evaluated what rank 0 evaluates; None where that did not run.
    """

    ranks: Sequence[Record]
    one: Record
    again: Record | None = None
    moved: Record | None = None


@dataclass(frozen=True)
class StepOfJob:
    """One step, of the ranks and of one process.

    Attributes:
        number: from 1.
        runs: of which it is one.
        ranks: what each rank recorded.
        one: what one process did.
        again: the same with sums in reverse, or None.
    """

    number: int
    runs: Runs
    ranks: tuple[Record, ...]
    one: Record
    again: Record | None

    @property
    def facts(self) -> Mapping[str, Any]:
        """Of rank 0's whole run."""
        facts: Mapping[str, Any] = self.runs.ranks[0]["facts"]
        return facts

    @functools.cached_property
    def noise(self) -> float:
        """What rounding does to outputs."""
        rounded = noise_of_rounding(self.one)
        if self.again is None:
            return rounded
        return max(rounded, min(measure_calls([self.again], self.one, limit_of(0.0, self.precision)).outputs, 1.0))

    @property
    def precision(self) -> float:
        """Of the arithmetic; what numbers of 16 bits take from it is noise."""
        return _SINGLE if self.one["single"] else min(float(self.one["precision"]), _SINGLE)

    @property
    def rounding(self) -> float:
        """The relative difference up to which outputs, and what is made of them, count as the same."""
        return TIMES_NOISE * self.noise

    @property
    def tolerance(self) -> float:
        """The same of losses, and of the weights with which ranks make a gradient."""
        return max(1e-9, 100 * self.precision, self.rounding)

    @functools.cached_property
    def samples(self) -> Samples:
        """Which samples it was made of."""
        return measure_samples(self.ranks, self.one)

    @functools.cached_property
    def calls(self) -> Calls:
        """What entered the models and came out of them."""
        return measure_calls(self.ranks, self.one, limit_of(self.noise, self.precision), self.samples.padded > 0)

    @functools.cached_property
    def losses(self) -> Losses:
        """What backward() was called on."""
        return _measure_losses(self.ranks, self.one)

    @functools.cached_property
    def gradients(self) -> Gradients:
        """What was computed, and what the optimizer took of it."""
        return Gradients(self.ranks, self.one, self.again, self.precision)

    def is_far(self, relative: float) -> bool:
        """Whether a relative difference is more than rounding."""
        return far(relative, limit_of(self.noise, self.precision))

    def found(self, stage: str, key: str, measured: str, **values: Any) -> Difference:
        """A difference of this step; see `difference`."""
        lines = self.ranks[0]["lines"].get(_EVENTS.get(stage, ""), ())
        return difference(self.number, stage, key, measured, tuple(lines), **values)


def each_step(runs: Runs) -> Iterable[StepOfJob]:
    """The steps that the ranks and one process took."""
    for number, steps in enumerate(zip(runs.one["steps"], *(each["steps"] for each in runs.ranks), strict=False)):
        again = [] if runs.again is None else runs.again["steps"][number : number + 1]
        own, *then = _by_names_of_first(_without_overflow([*steps, *again]))
        own_again = then.pop() if again else None
        yield StepOfJob(number + 1, runs, tuple(then), own, own_again)


def _without_overflow(steps: list[Record]) -> list[Record]:
    """A step without the backward passes that overflowed in any process, which a GradScaler takes back."""
    counts = {len(each["backwards"]) for each in steps}
    places = [
        place
        for place in range(min(counts))
        if all(_is_finite(each["backwards"][place]["local"].values()) for each in steps)
    ]
    if len(counts) > 1 or not places:
        return steps
    return [{**each, "backwards": [each["backwards"][place] for place in places]} for each in steps]


def _by_names_of_first(steps: Sequence[Record]) -> list[Record]:
    """Steps whose parameters go by the names that they have in the first, and what was called, if it is the same.

    Lightning's Trainer wraps a module on several ranks, and calls the parts of it on one process. Parameters are in the
    same places of the optimizer.
    """
    first, *others = steps
    roots = [[call["name"] for call in each["calls"]] for each in steps]
    if any(each["names"] != first["names"] and len(each["names"]) == len(first["names"]) for each in others):
        others = [_renamed(each, dict(zip(each["names"], first["names"], strict=False))) for each in others]
    if any(len(each) == len(roots[0]) and each != roots[0] for each in roots):
        return [{**each, "calls": []} for each in (first, *others)]
    return [first, *others]


def _renamed(step: Record, names: Mapping[str, str]) -> Record:
    def renamed(values: Record) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in values.items()}

    backwards = [{**each, "local": renamed(each["local"])} for each in step["backwards"]]
    own = [names.get(name, name) for name in step["names"]]
    return {**step, "names": own, "backwards": backwards, "after": renamed(step["after"])}


def _is_finite(values: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(each).all()) for each in values)
