"""Times contestants against each other, in the same rank processes.

A configuration (say, all_reduce of 1 MiB on 2 ranks) is measured like this::

    calibrate   each contestant: double the iterations until one batch lasts `sample_s`
    round 0     A B C …                                       warm-up, dropped
    round 1     A B C …   a batch: barrier | one untimed call | timed iterations
    round 2     A B C …                                       until the budget is spent

Contestants take turns within every round, so a noisy second affects all of them alike; the sweeps go
through all configurations several times, so that it does not affect just one.

A sample is the duration of a batch divided by its iterations, on the slowest rank. The preceding
barrier runs on gloo, whose waiting ranks sleep, so they do not disturb a contestant that keeps only
one rank busy. It releases ranks at different moments; the untimed call synchronizes
them again, and refills the caches with the contestant's memory.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from lockstep.bench import stats
from lockstep.bench.results import Parameters, Series

__all__ = ["Budget", "Configuration", "Contestant", "agree_on_maximum", "measure"]

_MAX_ITERATIONS = 4096


@dataclass(frozen=True)
class Contestant:
    """Something to time.

    Attributes:
        name: its name in the results.
        call: one iteration. All ranks call it equally often; it may do different things on each.
        settle: waits until all calls are done, if a call only starts something, as on a GPU; a batch
            ends with it.
        warms_up: whether an untimed call precedes each batch. Without, calls that last seconds cost half as much.
    """

    name: str
    call: Callable[[], object]
    settle: Callable[[], object] | None = None
    warms_up: bool = True


@dataclass(frozen=True)
class Configuration:
    """Contestants that compete under the same parameters."""

    parameters: Parameters
    contestants: Sequence[Contestant]


@dataclass(frozen=True)
class Budget:
    """How long to measure one configuration.

    Attributes:
        seconds: wall time of its timed rounds, over all sweeps, without calibration.
        sample_s: how long one batch should last; a batch is at least one iteration.
        min_rounds: fewest rounds per sweep, even if the time is up.
        max_rounds: most rounds per sweep, even if time is left.
        sweeps: number of sweeps through all configurations.
    """

    seconds: float
    sample_s: float
    min_rounds: int = 3
    max_rounds: int = 50
    sweeps: int = 2


@dataclass
class _Progress:
    """The state of a configuration: iterations per contestant, and this rank's batches so far."""

    configuration: Configuration
    iterations: list[int] = field(default_factory=list)  # empty before the first sweep
    meeting: dist.ProcessGroup | None = None  # group of the barriers; None for the default group
    rounds: list[list[float]] = field(default_factory=list)  # seconds per batch, one row per round


def measure(
    configurations: Sequence[Configuration],
    budget: Budget,
    meeting: dist.ProcessGroup | None = None,
    *,
    left_s: Callable[[], float] | None = None,
    report: Callable[[list[Series]], object] | None = None,
) -> list[Series]:
    """Measure all configurations. Collective.

    Args:
        configurations: the same on all ranks, in the same order.
        budget: budget of each configuration.
        meeting: a gloo group of all ranks; None for the default group, which must then be gloo.
        left_s: seconds left for all. Once they are used up on a rank, no further configuration is measured.
        report: called on every rank with the series of a configuration after each sweep through it, instead of
            printing a line on rank 0.

    Returns:
        One series per measured configuration and contestant, the same on all ranks.
    """
    progress = [_Progress(configuration, meeting=meeting) for configuration in configurations]
    for sweep in range(budget.sweeps):
        for item in progress:
            if left_s is not None and agree_on_maximum([-left_s()], meeting)[0] >= 0:
                return [series for item in progress if item.rounds for series in _to_series(item)]
            if not item.iterations:
                item.iterations = [
                    _calibrate(contestant, budget.sample_s, meeting) for contestant in item.configuration.contestants
                ]
            _measure_rounds(item, budget)
            if report is not None:
                report(_to_series(item))
            elif sweep == budget.sweeps - 1:
                _announce(item)
    return [series for item in progress for series in _to_series(item)]


def agree_on_maximum(values: Sequence[float], meeting: dist.ProcessGroup | None = None) -> list[float]:
    """Elementwise maximum over ranks, the same on all. Collective over a group, by default the default group."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=meeting)
    return [float(value) for value in tensor.tolist()]


def _calibrate(contestant: Contestant, sample_s: float, meeting: dist.ProcessGroup | None) -> int:
    """Number of iterations for a batch of about `sample_s`; the calls made to find it also warm up."""
    iterations = 1
    contestant.call()
    while True:
        seconds = agree_on_maximum([_time_batch(contestant, iterations, meeting)], meeting)[0]
        if seconds >= sample_s / 2 or iterations >= _MAX_ITERATIONS:
            break
        iterations *= 2
    per_iteration = seconds / iterations
    return max(1, min(_MAX_ITERATIONS, round(sample_s / per_iteration)))


def _measure_rounds(item: _Progress, budget: Budget) -> None:
    """The rounds of one sweep of a configuration."""
    contestants = item.configuration.contestants
    started = time.perf_counter()
    for number in range(budget.max_rounds + 1):
        row = [_time_batch(*pair, item.meeting) for pair in zip(contestants, item.iterations, strict=True)]
        if number == 0:
            continue  # its caches were cold
        item.rounds.append(row)
        elapsed = agree_on_maximum([time.perf_counter() - started], item.meeting)[0]
        if number >= budget.min_rounds and elapsed >= budget.seconds / budget.sweeps:
            break


def _time_batch(contestant: Contestant, iterations: int, meeting: dist.ProcessGroup | None) -> float:
    """Seconds that `iterations` calls take on this rank."""
    call, settle = contestant.call, contestant.settle or _nothing
    gc.disable()  # a collection in one contestant's batch may free another's garbage
    try:
        dist.barrier(meeting)
        if contestant.warms_up:
            call()
            settle()
        started = time.perf_counter()
        for _ in range(iterations):
            call()
        settle()
        return time.perf_counter() - started
    finally:
        gc.enable()


def _nothing() -> None:
    """For calls that are done when they return."""


def _slowest_rank(item: _Progress) -> torch.Tensor:
    """Seconds per iteration on the slowest rank; shape (rounds, contestants), float64. Collective."""
    batches = torch.tensor(item.rounds, dtype=torch.float64)
    dist.all_reduce(batches, op=dist.ReduceOp.MAX, group=item.meeting)
    return batches / torch.tensor(item.iterations, dtype=torch.float64)


def _to_series(item: _Progress) -> list[Series]:
    columns = _slowest_rank(item).T.tolist()
    return [
        Series(dict(item.configuration.parameters), contestant.name, iterations, samples)
        for contestant, iterations, samples in zip(
            item.configuration.contestants, item.iterations, columns, strict=True
        )
    ]


def _announce(item: _Progress) -> None:
    """Print the times, on rank 0."""
    columns = _slowest_rank(item).T.tolist()
    if dist.get_rank() != 0:
        return
    where = ", ".join(f"{name} {value}" for name, value in item.configuration.parameters.items())
    times = ", ".join(
        f"{contestant.name} {stats.median(samples) * 1e3:.4g}"
        for contestant, samples in zip(item.configuration.contestants, columns, strict=True)
    )
    print(f"  {where}: {times} ms ({len(item.rounds)} samples)", file=sys.stderr, flush=True)
