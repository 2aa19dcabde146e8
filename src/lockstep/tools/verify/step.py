"""One step of the ranks and of one process, in a form that can be compared, and what was measured of it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.tools.verify.calls import Calls, measure_calls
from lockstep.tools.verify.compare import (
    TIMES_NOISE,
    Gradients,
    Losses,
    far,
    limit_of,
    measure_gradients,
    measure_losses,
    noise_of_rounding,
)
from lockstep.tools.verify.samples import Samples, measure_samples
from lockstep.tools.verify.words import Difference, difference

__all__ = ["Record", "StepOfJob", "counted", "each_step"]

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
Record = Mapping[str, Any]


def counted(count: int, word: str) -> str:
    """`1 sample`, `2 samples`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class StepOfJob:
    """One step, of the ranks and of one process.

    Attributes:
        number: from 1.
        facts: of each rank's whole run, with all its `steps`.
        own_facts: the same of one process.
        ranks: what each rank recorded.
        one: what one process did.
        again: the same with halved sums, or None.
    """

    number: int
    facts: tuple[Record, ...]
    own_facts: Record
    ranks: tuple[Record, ...]
    one: Record
    again: Record | None

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
        return measure_losses(self.ranks, self.one)

    @functools.cached_property
    def gradients(self) -> Gradients:
        """What was computed, and what the optimizer took of it."""
        return measure_gradients(self.ranks, self.one, self.again, self.precision)

    def is_far(self, relative: float) -> bool:
        """Whether a relative difference is more than rounding."""
        return far(relative, limit_of(self.noise, self.precision))

    def found(self, stage: str, key: str, measured: str, **values: Any) -> Difference:
        """A difference of this step; see `difference`."""
        lines = self.ranks[0]["lines"].get(_EVENTS.get(stage, ""), ())
        return difference(self.number, stage, key, measured, tuple(lines), **values)


def each_step(ranks: Sequence[Record], one: Record, again: Record | None) -> Iterable[StepOfJob]:
    """The steps that all of them took.

    Args:
        ranks: the records of the ranks.
        one: of one process.
        again: of one process with halved sums; None where that did not run.
    """
    own_facts, *facts = ({**each["facts"], "steps": each["steps"]} for each in (one, *ranks))
    for number in range(min(len(each["steps"]) for each in (one, *ranks))):
        runs = [one, *ranks] if again is None or number >= len(again["steps"]) else [one, *ranks, again]
        own, *then = _by_names_of_first(_without_overflow([each["steps"][number] for each in runs]))
        own_again = None if len(then) == len(ranks) else then.pop()
        yield StepOfJob(number + 1, tuple(facts), own_facts, tuple(then), own, own_again)


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


def _is_finite(values: Iterable[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(each).all()) for each in values)
