"""Times contestants against each other inside one set of rank processes.

How one configuration (say, all_reduce of 1 MiB at 2 ranks) is measured::

    calibrate   each contestant: double the iterations until one batch lasts `sample_s`
    round 0     A B C …                                       warm-up, dropped
    round 1     A B C …   a batch: barrier | one untimed call | timed iterations
    round 2     A B C …                                       until the budget is spent

Contestants take turns within every round, so a noisy second hits all of them alike; the sweeps go
through all configurations several times, so that it does not hit one configuration alone.

A sample is the duration of one batch divided by its iterations, on the slowest rank. The barrier in
front runs on gloo, whose waiting ranks sleep: a contestant that keeps one rank busy and the others
idle is not disturbed by them. It also lets ranks go at different moments; the untimed call lines
them up again, and brings the contestant's memory back into the caches that its rival has used.
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
        name: as it stands in the results.
        call: one iteration. All ranks call it equally often; what it does may differ by rank.
        settle: waits until the calls made so far are done, where a call only begins something, as on a GPU; a batch
            ends with it.
        warms_up: before a batch there is one untimed call. Without it a call that lasts seconds costs half as much.
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
        seconds: wall time for its timed rounds, over all sweeps; calibration comes on top.
        sample_s: how long one batch should last; a batch is at least one iteration.
        min_rounds: rounds per sweep that are measured even if the time is up.
        max_rounds: rounds per sweep that are enough even if time is left.
        sweeps: how many times all configurations are gone through.
    """

    seconds: float
    sample_s: float
    min_rounds: int = 3
    max_rounds: int = 50
    sweeps: int = 2


@dataclass
class _Progress:
    """One configuration on its way: iterations per contestant, and this rank's batches so far."""

    configuration: Configuration
    iterations: list[int] = field(default_factory=list)  # none before the first sweep
    meeting: dist.ProcessGroup | None = None  # where ranks meet in between; None for the default group
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
        budget: for each of them.
        meeting: a gloo group of all ranks; None for the default group, which must then be gloo.
        left_s: seconds left for all of it. Once they are spent on one rank, no further configuration is measured.
        report: called on every rank with the series of a configuration after each sweep through it, in the place of
            the line that rank 0 prints.

    Returns:
        One series per configuration and contestant, the same on all ranks; none of what there was no time for.
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
    """Elementwise maximum over ranks, the same on all of them. Collective over a group, default the default group."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=meeting)
    return [float(value) for value in tensor.tolist()]


def _calibrate(contestant: Contestant, sample_s: float, meeting: dist.ProcessGroup | None) -> int:
    """Iterations for a batch of about `sample_s`; the calls made to find out also warm up."""
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
    """One sweep's rounds of one configuration."""
    contestants = item.configuration.contestants
    started = time.perf_counter()
    for number in range(budget.max_rounds + 1):
        row = [_time_batch(*pair, item.meeting) for pair in zip(contestants, item.iterations, strict=True)]
        if number == 0:
            continue  # its caches still held what the previous configuration left
        item.rounds.append(row)
        elapsed = agree_on_maximum([time.perf_counter() - started], item.meeting)[0]
        if number >= budget.min_rounds and elapsed >= budget.seconds / budget.sweeps:
            break


def _time_batch(contestant: Contestant, iterations: int, meeting: dist.ProcessGroup | None) -> float:
    """Seconds that `iterations` calls take on this rank."""
    call, settle = contestant.call, contestant.settle or _nothing
    gc.disable()  # a collection in one contestant's batch may sweep up its rival's garbage
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
    """A call is done when it returns."""


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
    """Rank 0 tells whoever is watching what came out."""
    columns = _slowest_rank(item).T.tolist()
    if dist.get_rank() != 0:
        return
    where = ", ".join(f"{name} {value}" for name, value in item.configuration.parameters.items())
    times = ", ".join(
        f"{contestant.name} {stats.median(samples) * 1e3:.4g}"
        for contestant, samples in zip(item.configuration.contestants, columns, strict=True)
    )
    print(f"  {where}: {times} ms ({len(item.rounds)} samples)", file=sys.stderr, flush=True)
