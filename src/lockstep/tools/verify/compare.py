"""How far N ranks are from one process in each stage of a step: pure functions over what was recorded.

Nothing here says what a difference means; see `causes.py`.

[Note: how far is far] A difference is measured against the largest number of its stage. It counts where it is above
what rounding does, which is measured for each stage and tensor: the same step of one process, with its sums cut in
two (see [Note: halves] in draws.py), moves them by some amount, and `TIMES_NOISE` of that is rounding. Numbers of 16
bits are so few that both often come out the same: where a step computes with some, `_ROUNDINGS` of them are, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.tools.verify.samples import calls_of

__all__ = [
    "TIMES_NOISE",
    "Fit",
    "Gradients",
    "Losses",
    "Values",
    "distance_of_gradients",
    "distances",
    "far",
    "fit_ranks",
    "limit_of",
    "measure_gradients",
    "measure_losses",
    "measure_values",
    "noise_of_rounding",
    "relative",
]

TIMES_NOISE = 50.0
_FLOOR_IN_EPS = 400.0
_ROUNDINGS = 4.0
# What may be left of a gradient that a fit explains, however much rounding does.
_MOST_REST = 1e-3

_Step = Mapping[str, Any]


def limit_of(noise: float, precision: float) -> float:
    """The largest relative difference that rounding makes. See [Note: how far is far]."""
    return max(_FLOOR_IN_EPS * max(precision, 1e-13), TIMES_NOISE * noise)


def far(difference: float, limit: float) -> bool:
    """Whether a relative difference is more than that: no number is, too."""
    return not difference <= limit


def noise_of_rounding(step: _Step) -> float:
    """What has to count as noise because a step computes with numbers of 16 bits; see [Note: how far is far]."""
    return _ROUNDINGS / TIMES_NOISE * float(step["rounded"])


def relative(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """Largest difference, if above `least`, over the largest number; infinity for other shapes and if one is finite."""
    if a.shape != b.shape:
        return float("inf")
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return float("inf")
    a, b = a[finite], b[finite]
    if not a.numel():
        return 0.0
    difference, scale = float((a - b).abs().max()), max(float(a.abs().max()), float(b.abs().max()))
    return 0.0 if difference <= least or scale == 0.0 else difference / scale


@dataclass(frozen=True)
class Losses:
    """What backward() was called on.

    Attributes:
        one: of one process, a number for each backward pass.
        ranks: of each rank.
        rows: samples of each rank, for each backward pass.
        weights: how much each rank's backward passes count where ranks are averaged as they should be.
    """

    one: tuple[float | None, ...]
    ranks: tuple[tuple[float | None, ...], ...]
    rows: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]

    @property
    def shares(self) -> list[float]:
        """Samples of each rank's backward passes, among those of all ranks in the same pass; rank by rank."""
        totals = [
            sum(each[place] for each in self.rows if place < len(each)) or 1 for place in range(len(self.rows[0]))
        ]
        return [row / totals[place] for each in self.rows for place, row in enumerate(each) if place < len(totals)]

    def sums(self, how: str) -> tuple[float, float] | None:
        """(one process's loss, what the ranks' make) over all backward passes.

        Args:
            how: "weighted" by samples, or "sum".
        """
        if any(len(each) != len(self.one) for each in self.ranks):
            return None
        total = mine = 0.0
        for place, own in enumerate(self.one):
            values = [each[place] for each in self.ranks]
            if own is None or any(value is None for value in values):
                return None
            rows = [each[place] for each in self.rows]
            count = sum(rows) or 1
            weights = [row / count if how == "weighted" else float(row > 0) for row in rows]
            total += sum(weight * float(value or 0) for weight, value in zip(weights, values, strict=True))
            mine += own
        return mine, total

    def are(self, how: str, tolerance: float) -> bool:
        """Whether one process's loss is what the ranks' make."""
        found = self.sums(how)
        return found is not None and abs(found[0] - found[1]) <= tolerance * max(abs(found[0]), abs(found[1]), 1e-30)


def measure_losses(ranks: Sequence[_Step], one: _Step) -> Losses:
    """Collect the losses of a step."""
    return Losses(
        one=_losses_of(one),
        ranks=tuple(map(_losses_of, ranks)),
        rows=tuple(tuple(_rows_of(step, each) for each in step["backwards"]) for step in ranks),
        weights=tuple(tuple(_weight_of(step, each, len(ranks)) for each in step["backwards"]) for step in ranks),
    )


def _losses_of(step: _Step) -> tuple[float | None, ...]:
    return tuple(None if None in each["losses"] else sum(each["losses"]) for each in step["backwards"])


def _batch_of(step: _Step, backward: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The batch that a backward pass was for."""
    return step["batches"][backward["batch"]] if 0 <= backward["batch"] < len(step["batches"]) else None


def _rows_of(step: _Step, backward: Mapping[str, Any]) -> int:
    batch = _batch_of(step, backward)
    if batch is None:
        return sum(call["count"] for call in calls_of(step)) or 1
    return 0 if batch["filler"] else int(batch["rows"])


def _weight_of(step: _Step, backward: Mapping[str, Any], world_size: int) -> float:
    """What averaging makes the mean loss of a backward pass count: by its loader's share, else one of N."""
    batch = None if backward["weighed"] else _batch_of(step, backward)
    return 1 / world_size if batch is None or batch["weight"] is None else float(batch["weight"])


@dataclass(frozen=True)
class Values:
    """How far tensors are apart.

    Attributes:
        worst: the largest relative difference.
        names: of those that are further apart than rounding, the furthest first.
        count: of all that were compared.
    """

    worst: float
    names: tuple[str, ...]
    count: int


def measure_values(
    a: Mapping[str, Tensor | None],
    b: Mapping[str, Tensor | None],
    precision: float,
    noise: Mapping[str, float] | None = None,
    least: float = 0.0,
) -> Values:
    """Compare tensors by name. One that is None counts as zeros.

    Args:
        a: some.
        b: the same of another process.
        precision: of the arithmetic.
        noise: what rounding does to each.
        least: numbers up to this are none.
    """
    found = {}
    for name in {**a, **b}:
        one, other = a.get(name), b.get(name)
        some = other if one is None else one
        if some is not None:
            zeros = torch.zeros_like(some)
            found[name] = relative(zeros if one is None else one, zeros if other is None else other, least)
    wrong = [name for name, value in found.items() if far(value, limit_of((noise or {}).get(name, 0.0), precision))]
    wrong.sort(key=lambda name: -found[name])
    return Values(
        max((found[name] for name in wrong), default=max(found.values(), default=0.0)), tuple(wrong), len(found)
    )


def distances(a: Mapping[str, Tensor | None], b: Mapping[str, Tensor | None], least: float = 0.0) -> dict[str, float]:
    """Relative difference of each tensor."""
    return {
        name: relative(one, other, least)
        for name, one in a.items()
        if one is not None and (other := b.get(name)) is not None
    }


@dataclass(frozen=True)
class Fit:
    """The gradient of one process as a sum of what the ranks computed, each times a number.

    Attributes:
        factors: the number for each rank and backward pass, rank by rank.
        rest: the part of the gradient that is left.
        rounding: what rounding may leave.
    """

    factors: tuple[float, ...]
    rest: float
    rounding: float

    @property
    def is_good(self) -> bool:
        """Whether nothing but rounding is left."""
        return self.rest <= self.rounding


def fit_ranks(target: Tensor, parts: Sequence[Tensor], rounding: float = _MOST_REST) -> Fit:
    """Least squares; of ranks that computed the same each gets the same factor.

    Args:
        target: the gradient, flat.
        parts: what each rank computed.
        rounding: what may be left.
    """
    size = float(target.norm())
    if not parts or size == 0.0 or not bool(torch.isfinite(target).all()):
        return Fit((), 0.0 if size == 0.0 else float("inf"), rounding)
    matrix = torch.stack(list(parts), 1)
    if not bool(torch.isfinite(matrix).all()):
        return Fit((), float("inf"), rounding)
    solution = torch.linalg.pinv(matrix, rtol=1e-10) @ target
    return Fit(tuple(solution.tolist()), float((matrix @ solution - target).norm()) / size, rounding)


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step.

    Attributes:
        between: those that the optimizer took, rank by rank against rank 0.
        used: those that the optimizer took, against one process.
        factor: the ranks' gradients are one process's times this; None for no common factor.
        needed: one process's gradient out of what the ranks computed.
        taken: the gradient that rank 0's optimizer took out of the same.
        scale: what one process's optimizer took is what it computed times this (clipped, unscaled); None for neither.
        zeros: of each rank's backward passes, whether it left nothing but zeros; of one process's last.
        were_alike: those of rank 0 were one process's when backward() returned.
    """

    between: Values
    used: Values
    factor: float | None
    needed: Fit
    taken: Fit
    scale: float | None
    zeros: tuple[bool, ...]
    were_alike: bool


def _used(step: _Step) -> dict[str, Tensor | None]:
    return {
        f"{place}:{name}": value for place, (name, value) in enumerate(zip(step["names"], step["used"], strict=True))
    }


def _left(step: _Step) -> dict[str, Tensor | None]:
    """What backward() left for the optimizer."""
    return {f"{place}:{name}": step["after"][name] for place, name in enumerate(step["names"]) if name in step["after"]}


def _flat(names: Sequence[str], values: Mapping[str, Tensor | None], like: Mapping[str, Tensor | None]) -> Tensor:
    """All numbers but the norms, which do not add up."""
    parts = []
    for name in names:
        value, shape = values.get(name), like[name]
        assert shape is not None
        parts.append(torch.zeros_like(shape[:-1]) if value is None or value.shape != shape.shape else value[:-1])
    return torch.cat(parts) if parts else torch.zeros(0)


def _total(step: _Step) -> dict[str, Tensor | None]:
    total: dict[str, Tensor | None] = {}
    for each in step["backwards"]:
        for name, value in each["local"].items():
            before = total.get(name)
            total[name] = value if before is None else before + value
    return total


def measure_gradients(ranks: Sequence[_Step], one: _Step, again: _Step | None, precision: float) -> Gradients:
    """Compare the gradients of a step."""
    own, theirs, rounded = _used(one), [_used(step) for step in ranks], noise_of_rounding(one)
    least = _least_gradient(own, precision)
    moved_by = {} if again is None else distances(own, _used(again), least)
    noise = {name: max(rounded, moved_by.get(name, 0.0)) for name in own}
    between = [measure_values(theirs[0], other, precision, noise, least) for other in theirs[1:]]
    used = measure_values(theirs[0], own, precision, noise, least)
    both = [name for name, value in own.items() if value is not None and theirs[0].get(name) is not None]
    most = max(1e4 * max(precision, 1e-12), TIMES_NOISE * rounded)
    common = fit_ranks(_flat(both, theirs[0], own), [_flat(both, own, own)], most)
    total = _total(one)
    names = [name for name, value in total.items() if value is not None]
    parts = [_flat(names, each["local"], total) for step in ranks for each in step["backwards"]]
    whole = _flat(names, total, total)
    moved = 0.0 if again is None else relative(whole, _flat(names, _total(again), total))
    rounding = max(min(_MOST_REST, max(1e-9, 100 * precision, TIMES_NOISE * moved)), TIMES_NOISE * rounded)
    took, kept = (dict(zip(step["names"], step["used"], strict=True)) for step in (ranks[0], one))
    left, own_left = _left(ranks[0]), _left(one)
    taken, own_taken = _flat(names, took, total), _flat(names, kept, total)
    uncut = _below_limits([taken, own_taken], len(parts))
    return Gradients(
        between=max(between, key=lambda each: (len(each.names), each.worst), default=Values(0.0, (), 0)),
        used=used,
        factor=_only(common),
        needed=fit_ranks(whole, parts, rounding),
        taken=fit_ranks(taken[uncut], [each[uncut] for each in parts], rounding),
        scale=_only(fit_ranks(own_taken[uncut], [whole[uncut]], rounding)),
        zeros=tuple(not bool(each.any()) for each in (*parts, whole)),
        were_alike=bool(own_left) and not measure_values(left, own_left, precision, noise, least).names,
    )


def _least_gradient(gradients: Mapping[str, Tensor | None], precision: float) -> float:
    """Numbers up to this are rounding of others."""
    sizes = (value[:-1].abs().max() for value in gradients.values() if value is not None and value.numel() > 1)
    return 100 * precision * max(map(float, sizes), default=0.0)


def _below_limits(gradients: Sequence[Tensor], unknowns: int) -> Tensor:
    """Which numbers no clipping by value has cut: it leaves several with the size of the largest, exactly."""
    uncut = torch.ones_like(gradients[0], dtype=torch.bool)
    for each in gradients:
        cut = each.abs() == each.abs().max() if each.numel() else uncut
        uncut &= ~cut if int(cut.sum()) > 1 else True
    return uncut if int(uncut.sum()) > unknowns else torch.ones_like(uncut)


def _only(fit: Fit) -> float | None:
    return fit.factors[0] if fit.is_good and fit.factors else None


def distance_of_gradients(one: _Step, again: _Step) -> float:
    """The part of the gradients that a second run did not compute: all together, up to a common factor.

    Together, because one tensor may be made of rounding alone, such as the bias before a batch norm.
    """
    own, theirs = _used(one), _used(again)
    names = [name for name, value in own.items() if value is not None]
    return fit_ranks(_flat(names, own, own), [_flat(names, theirs, own)]).rest
