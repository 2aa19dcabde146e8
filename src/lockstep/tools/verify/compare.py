"""How far numbers of two processes are apart, and what they are as sums of each other.

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

__all__ = [
    "MOST_REST",
    "TIMES_NOISE",
    "Fit",
    "Tensors",
    "Values",
    "distances",
    "far",
    "fit_ranks",
    "limit_of",
    "measure_values",
    "noise_of_rounding",
    "relative",
]

TIMES_NOISE = 50.0
_FLOOR_IN_EPS = 400.0
_ROUNDINGS = 4.0
# What may be left of a gradient that a fit explains, however much rounding does.
MOST_REST = 1e-3

# By name, or by place; None for a gradient that is not there.
Tensors = Mapping[Any, Tensor | None]


def limit_of(noise: float, precision: float) -> float:
    """The largest relative difference that rounding makes. See [Note: how far is far]."""
    return max(_FLOOR_IN_EPS * max(precision, 1e-13), TIMES_NOISE * noise)


def far(difference: float, limit: float) -> bool:
    """Whether a relative difference is more than that: no number is, too."""
    return not difference <= limit


def noise_of_rounding(step: Mapping[str, Any]) -> float:
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


def distances(a: Tensors, b: Tensors, least: float = 0.0) -> dict[Any, float]:
    """Relative difference of each tensor; one that only one side has counts as zeros on the other."""
    found = {}
    for name in {**a, **b}:
        one, other = a.get(name), b.get(name)
        some = other if one is None else one
        if some is not None:
            zeros = torch.zeros_like(some)
            found[name] = relative(zeros if one is None else one, zeros if other is None else other, least)
    return found


@dataclass(frozen=True)
class Values:
    """How far tensors are apart.

    Attributes:
        worst: the largest relative difference.
        names: of those that are further apart than rounding, the furthest first.
        count: of all that were compared.
    """

    worst: float = 0.0
    names: tuple[Any, ...] = ()
    count: int = 0


def measure_values(
    a: Tensors, b: Tensors, precision: float, noise: Mapping[Any, float] | None = None, least: float = 0.0
) -> Values:
    """Compare tensors by name: `noise` is what rounding does to each; differences up to `least` are none."""
    found, noise = distances(a, b, least), noise or {}
    wrong = [name for name, value in found.items() if far(value, limit_of(noise.get(name, 0.0), precision))]
    wrong.sort(key=lambda name: -found[name])
    worst = found[wrong[0]] if wrong else max(found.values(), default=0.0)
    return Values(worst, tuple(wrong), len(found))


@dataclass(frozen=True)
class Fit:
    """A gradient as a sum of others, each times a number.

    Attributes:
        factors: those numbers.
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

    @property
    def factor(self) -> float | None:
        """Of a gradient that is a multiple of another; None if it is not."""
        return self.factors[0] if self.is_good and self.factors else None


def fit_ranks(target: Tensor, parts: Sequence[Tensor], rounding: float = MOST_REST) -> Fit:
    """Least squares, of flat gradients; of ranks that computed the same each gets the same factor."""
    size = float(target.norm())
    if not parts or size == 0.0 or not bool(torch.isfinite(target).all()):
        return Fit((), 0.0 if size == 0.0 else float("inf"), rounding)
    matrix = torch.stack(list(parts), 1)
    if not bool(torch.isfinite(matrix).all()):
        return Fit((), float("inf"), rounding)
    solution = torch.linalg.pinv(matrix, rtol=1e-10) @ target
    return Fit(tuple(solution.tolist()), float((matrix @ solution - target).norm()) / size, rounding)
