"""Median, spread and bootstrap intervals of interleaved samples.

Contestants are measured round-robin, so samples `i` of any two were taken
at almost the same time, with the same noise. The bootstrap therefore resamples whole rounds, not
the samples of each contestant separately: noise that affects a whole round cancels in a ratio.

    >>> ratio([4.0, 4.0, 4.0], [2.0, 2.0, 2.0])
    Estimate(value=2.0, low=2.0, high=2.0)
    >>> round(geometric_mean([1.0, 10.0, 100.0]), 9)
    10.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Estimate",
    "bootstrap",
    "geometric_mean",
    "geometric_mean_ratio",
    "median",
    "overhead",
    "percentiles",
    "ratio",
]

Array = NDArray[np.float64]

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value, with its 95% bootstrap interval.

    Attributes:
        value: computed from the medians of all samples.
        low: 2.5th percentile over the resamples.
        high: 97.5th percentile over the resamples.
    """

    value: float
    low: float
    high: float


def median(samples: Sequence[float]) -> float:
    """The median of at least one sample."""
    _require_samples(samples)
    return float(np.median(samples))


def percentiles(samples: Sequence[float], low: float = 10, high: float = 90) -> tuple[float, float]:
    """The spread of the samples: by default their 10th and 90th percentile."""
    _require_samples(samples)
    return float(np.percentile(samples, low)), float(np.percentile(samples, high))


def bootstrap(
    function: Callable[..., float | Array],
    *series: Sequence[float],
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """A function of medians, with its interval over resampled rounds.

    Args:
        function: takes a median per series, and must work elementwise, as arithmetic does: it is
            called once with floats and once with arrays of shape (num_resamples,).
        *series: samples of each contestant; the same number, because they share their rounds.
        num_resamples: number of resamples of the rounds, with replacement.
        seed: random seed, so that a table generated twice from a file is the same.

    Raises:
        ValueError: no samples, or series of different lengths.
    """
    value = float(function(*(median(samples) for samples in series)))
    return _interval(value, _resample(function, series, num_resamples, seed))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Estimate:
    """Ratio of medians: above 1 when the numerator's contestant is the slower one."""
    return bootstrap(lambda above, below: above / below, numerator, denominator)


def overhead(samples: Sequence[float], floor: Sequence[float]) -> Estimate:
    """Overhead of `samples` over `floor`, as a fraction of `floor`: 0.1 is ten percent."""
    return bootstrap(lambda total, least: total / least - 1.0, samples, floor)


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive values, which is the mean for ratios.

    Raises:
        ValueError: no values, or one that is not positive.
    """
    _require_samples(values)
    if min(values) <= 0:
        raise ValueError(f"a geometric mean needs positive values, got {min(values)}")
    return float(np.exp(np.mean(np.log(values))))


def geometric_mean_ratio(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Estimate:
    """Geometric mean over several ratios of medians, with its interval.

    Each pair is resampled separately, since different pairs were measured at different times.

    Args:
        pairs: numerator and denominator samples of each ratio.
    """

    def divide(above: float | Array, below: float | Array) -> float | Array:
        return above / below

    value = geometric_mean([median(above) / median(below) for above, below in pairs])
    draws = [_resample(divide, pair, NUM_RESAMPLES, seed) for seed, pair in enumerate(pairs)]
    return _interval(value, np.exp(np.mean(np.log(draws), axis=0)))


def _resample(
    function: Callable[..., float | Array], series: Sequence[Sequence[float]], num_resamples: int, seed: int
) -> Array:
    """`function` of the medians of resampled rounds; shape (num_resamples,)."""
    lengths = [len(samples) for samples in series]
    if len(set(lengths)) != 1:
        raise ValueError(f"series share their rounds, so they must have the same length; got {lengths}")
    rounds = np.random.default_rng(seed).integers(0, lengths[0], size=(num_resamples, lengths[0]))
    medians = [np.median(np.asarray(samples, dtype=np.float64)[rounds], axis=1) for samples in series]
    return np.asarray(function(*medians), dtype=np.float64)


def _interval(value: float, draws: Array) -> Estimate:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(draws, [tail, 100 - tail])
    return Estimate(value, float(low), float(high))


def _require_samples(samples: Sequence[float]) -> None:
    if len(samples) == 0:
        raise ValueError("no samples: a statistic needs at least one")
