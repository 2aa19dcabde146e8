"""Distances between the numbers of two processes, and fits of one as a sum of others.

`causes.py` interprets the differences.

[Note: how far is far] A difference is measured relative to the largest number of its stage. It counts if it exceeds the
effect of rounding, which is measured for each stage and tensor: the same step of one process, with its sums cut in two
(see `halves.py`), moves them by some amount, and `TIMES_NOISE` times that is rounding. With the few digits of 16-bit
numbers both often come out equal: if a step uses them, `_ROUNDINGS` of them count as rounding, too.
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
# Upper limit for the rest of a gradient that counts as explained by a fit, even with much rounding.
MOST_REST = 1e-3

# By name, or by position; None for a missing gradient.
Tensors = Mapping[Any, Tensor | None]


def limit_of(noise: float, precision: float) -> float:
    """The largest relative difference that counts as rounding. See [Note: how far is far]."""
    return max(_FLOOR_IN_EPS * max(precision, 1e-13), TIMES_NOISE * noise)


def far(difference: float, limit: float) -> bool:
    """Whether a relative difference exceeds the limit; true for nan."""
    return not difference <= limit


def noise_of_rounding(step: Mapping[str, Any]) -> float:
    """The noise to assume because a step uses 16-bit numbers; see [Note: how far is far]."""
    return _ROUNDINGS / TIMES_NOISE * float(step["rounded"])


def relative(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """Largest difference, if above `least`, over the largest number; infinity if shapes or finiteness differ."""
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
    """Relative difference of each tensor; a tensor missing on one side counts as zeros."""
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
    """The distances between tensors.

    Attributes:
        worst: the largest relative difference.
        names: names of tensors that differ by more than rounding, the most different first.
        count: number of tensors compared.
    """

    worst: float = 0.0
    names: tuple[Any, ...] = ()
    count: int = 0


def measure_values(
    a: Tensors, b: Tensors, precision: float, noise: Mapping[Any, float] | None = None, least: float = 0.0
) -> Values:
    """Compare tensors by name: `noise` is the effect of rounding on each; differences up to `least` are ignored."""
    found, noise = distances(a, b, least), noise or {}
    wrong = [name for name, value in found.items() if far(value, limit_of(noise.get(name, 0.0), precision))]
    wrong.sort(key=lambda name: -found[name])
    worst = found[wrong[0]] if wrong else max(found.values(), default=0.0)
    return Values(worst, tuple(wrong), len(found))


@dataclass(frozen=True)
class Fit:
    """A gradient as a linear combination of others.

    Attributes:
        factors: the coefficients.
        rest: the relative size of the remainder.
        rounding: the remainder that rounding may leave.
        unsure: how far rounding may move a coefficient, relative to the largest.
    """

    factors: tuple[float, ...]
    rest: float
    rounding: float
    unsure: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether only rounding is left."""
        return self.rest <= self.rounding

    @property
    def factor(self) -> float | None:
        """The factor, if the gradient is a multiple of another, else None."""
        return self.factors[0] if self.is_good and self.factors else None


def fit_ranks(target: Tensor, parts: Sequence[Tensor], rounding: float = MOST_REST, prior: float = 0.0) -> Fit:
    """Least squares for flat gradients; of several solutions, the one whose factors are closest to `prior`."""
    size = float(target.norm())
    if not parts or size == 0.0 or not bool(torch.isfinite(target).all()):
        return Fit((), 0.0 if size == 0.0 else float("inf"), rounding)
    matrix = torch.stack(list(parts), 1)
    if not bool(torch.isfinite(matrix).all()):
        return Fit((), float("inf"), rounding)
    inverse, expected = torch.linalg.pinv(matrix, rtol=1e-10), prior * matrix.any(0).to(matrix.dtype)
    solution = expected + inverse @ (target - matrix @ expected)
    unsure = rounding * size * float(inverse.norm()) / max(float(solution.abs().max()), 1e-30)
    return Fit(tuple(solution.tolist()), float((matrix @ solution - target).norm()) / size, rounding, unsure)
