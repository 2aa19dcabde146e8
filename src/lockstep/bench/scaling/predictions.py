"""What a result of `lockstep bench scaling` says: rates, fits, predictions, residuals. Reads nothing but the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from lockstep.bench import stats
from lockstep.bench.pages import format_bytes
from lockstep.bench.results import Result
from lockstep.bench.scaling.model import (
    Computing,
    Line,
    Network,
    all_reduce_s,
    fit_curve,
    fit_line,
    step_on_one_host_s,
    step_s,
)

__all__ = ["Fits", "Rate", "Residual", "fit", "projection", "rates", "residuals"]

TARGET = 0.15
MOST_HOSTS = 64


@dataclass(frozen=True)
class Rate:
    """Training on so many ranks.

    Attributes:
        mode: weak: each rank has the batch; strong: all have it together.
        world_size: ranks.
        batch: samples of each rank.
        step_s: median of a step.
        samples_per_s: of all ranks.
        efficiency: of N ranks, in terms of N times the rate of one.
    """

    mode: str
    world_size: int
    batch: int
    step_s: float
    samples_per_s: float
    efficiency: float


@dataclass(frozen=True)
class Fits:
    """What was fitted.

    Attributes:
        computing: over samples of each rank, with as many ranks as a host has, none of them communicating.
        computing_together: seconds of the parts of a step with the ranks of all hosts of the check on this machine.
        network: link and host; None where no link was measured.
        crowded: the same with the ranks of all hosts of the check on this machine, all at once; None where that was
            not measured.
        host: an all_reduce on one host.
        engine_s: what a step of the engine takes beyond computing and all_reduces; seconds of a rank that has a core.
        crowding: how many times as many ranks a core has in the check as on a host of its own.
    """

    computing: Computing
    computing_together: tuple[float, float, float]
    network: Network | None
    crowded: Network | None
    host: Line
    engine_s: float
    crowding: float


@dataclass(frozen=True)
class Residual:
    """A prediction beside what was measured.

    Attributes:
        what: in words.
        predicted_s, measured_s: seconds; the latter a median.
        spread_s: 10th and 90th percentile of what was measured.
        is_check: whether it is held against the target; else the fit has seen it.
    """

    what: str
    predicted_s: float
    measured_s: float
    spread_s: tuple[float, float]
    is_check: bool

    @property
    def error(self) -> float:
        """How far off, as a fraction of what was measured; positive if predicted too slow."""
        return self.predicted_s / self.measured_s - 1

    @property
    def is_met(self) -> bool:
        """Whether that is within the target."""
        return abs(self.error) <= TARGET


def _number(result: Result, name: str) -> int:
    return int(cast(int, result.settings[name]))


def _by(result: Result, contestant: str, key: str, part: str, **parameters: int) -> dict[int, list[float]]:
    """Samples by one parameter, of those series that have the others."""
    wanted = {"part": part, **parameters}
    found = {
        int(one.parameters[key]): one.samples_s
        for one in result.series
        if one.contestant == contestant and key in one.parameters and wanted.items() <= one.parameters.items()
    }
    return dict(sorted(found.items()))


def rates(result: Result) -> list[Rate]:
    """Weak scaling, then strong; no ranks, no rows."""
    batch = _number(result, "batch")
    sizes = sorted({int(one.parameters["world_size"]) for one in result.series if one.parameters.get("part") == "step"})
    alone = _by(result, "step", "batch", "step", world_size=1).get(batch)
    found = []
    for mode in ("weak", "strong"):
        for n in sizes:
            own = batch if mode == "weak" else max(1, batch // n)
            samples = _by(result, "step", "batch", "step", world_size=n).get(own)
            if samples is None or alone is None:
                continue
            seconds = stats.median(samples)
            rate = own * n / seconds
            found.append(Rate(mode, n, own, seconds, rate, rate / (n * batch / stats.median(alone))))
    return found


def _computing(result: Result, world_size: int) -> Computing | None:
    """Fitted to differences of medians: forward, forward with backward, whole step."""
    parts = [
        _by(result, name, "batch", "step", world_size=world_size)
        for name in ("forward", "forward_backward", "step_alone")
    ]
    if not all(parts):
        return None
    medians = [{batch: stats.median(samples) for batch, samples in part.items()} for part in parts]
    lines = []
    for before, after in zip([None, *medians[:-1]], medians, strict=True):
        lines.append(
            fit_line({batch: [max(1e-9, after[batch] - (before[batch] if before else 0.0))] for batch in after})
        )
    return Computing(*lines)


def fit(result: Result) -> Fits | None:
    """The fits of a result; None if it was cut short before there was enough."""
    per_host, hosts, batch = (_number(result, name) for name in ("ranks_per_host", "hosts", "batch"))
    host_samples = _by(result, "all_reduce", "bytes", "host", world_size=per_host)
    computing = _computing(result, per_host)
    together = _computing(result, hosts * per_host)
    if not host_samples or computing is None or together is None:
        return None
    host = fit_line(host_samples)
    link_samples = _by(result, "message", "bytes", "link")
    network = Network(fit_curve(link_samples), host, per_host) if len(link_samples) > 1 else None
    parts = {
        name: _by(result, name, "batch", "step", world_size=hosts * per_host)[batch]
        for name in ("forward", "forward_backward", "step_alone")
    }
    forward, both, whole = (stats.median(samples) for samples in parts.values())
    together_s = (forward, max(0.0, both - forward), max(0.0, whole - both))
    engine_s = _engine_s(result, per_host, computing, host)
    cores = result.environment.cores
    crowding = max(1.0, hosts * per_host / cores) / max(1.0, per_host / cores)
    return Fits(computing, together_s, network, _crowded(result, per_host), host, engine_s, crowding)


def _engine_s(result: Result, per_host: int, computing: Computing, host: Line) -> float:
    """Fitted to steps of one host: the median, over batches, of what they take beyond what is predicted without it."""
    steps = _by(result, "step", "batch", "step", world_size=per_host)
    buckets = _buckets(result)
    beyond = [
        stats.median(samples) - step_on_one_host_s(computing.at(batch), buckets, host)
        for batch, samples in steps.items()
    ]
    return max(0.0, stats.median(beyond)) if beyond else 0.0


def _crowded(result: Result, per_host: int) -> Network | None:
    """What communication costs the ranks of the check, fitted to its pieces; by the bytes that all put on a link."""
    exchanges, sums, barrier = (_by(result, name, "bytes", "crowded") for name in ("exchange", "all_reduce", "barrier"))
    if min(len(exchanges), len(sums)) < 2 or not barrier:
        return None
    link = fit_curve({per_host * size: samples for size, samples in exchanges.items()})
    (told,) = barrier.values()
    return Network(link, fit_line(sums), per_host, stats.median(told))


def _buckets(result: Result) -> list[int]:
    return [int(one) for one in cast("list[int]", result.settings["buckets_bytes"])]


def _residual(what: str, predicted_s: float, samples: list[float], *, is_check: bool) -> Residual:
    return Residual(what, predicted_s, stats.median(samples), stats.percentiles(samples), is_check)


def residuals(result: Result, fits: Fits) -> list[Residual]:
    """Every prediction for which there is a measurement: of the fits themselves, of one host, and of the check."""
    per_host, hosts, batch = (_number(result, name) for name in ("ranks_per_host", "hosts", "batch"))
    found = []
    for size, samples in _by(result, "all_reduce", "bytes", "host", world_size=per_host).items():
        what = f"fitted: all_reduce of {format_bytes(size)} on one host"
        found.append(_residual(what, fits.host.at(size), samples, is_check=False))
    steps = _by(result, "step", "batch", "step", world_size=per_host).get(batch)
    if steps:
        predicted = step_on_one_host_s(fits.computing.at(batch), _buckets(result), fits.host) + fits.engine_s
        found.append(_residual(f"a step on one host with {per_host} ranks", predicted, steps, is_check=False))
    # The check's hosts share this machine's cores: its messages and sums take longer than on hosts of their own.
    if fits.crowded is None:
        return found
    for size, samples in _by(result, "all_reduce", "bytes", "check").items():
        what = f"all_reduce of {format_bytes(size)}, {hosts} hosts with {per_host} ranks"
        found.append(_residual(what, all_reduce_s(size, hosts, fits.crowded), samples, is_check=True))
    for own, samples in _by(result, "step", "batch", "check").items():
        what = f"step with {own} samples a rank, {hosts} hosts with {per_host} ranks"
        predicted = step_s(fits.computing_together, _buckets(result), hosts, fits.crowded)
        predicted += fits.engine_s * fits.crowding
        found.append(_residual(what, predicted, samples, is_check=True))
    return found


def projection(result: Result, fits: Fits) -> Mapping[str, list[Rate]]:
    """Weak and strong scaling over 1 to 64 hosts that have cores of their own; empty without a link.

    Efficiency is in terms of H times the rate of one host.
    """
    if fits.network is None:
        return {}
    per_host, batch = _number(result, "ranks_per_host"), _number(result, "batch")
    buckets = _buckets(result)
    hosts = [1 << power for power in range(MOST_HOSTS.bit_length())]
    found: dict[str, list[Rate]] = {}
    for mode in ("weak", "strong"):
        rows: list[Rate] = []
        for num_hosts in hosts:
            own = batch if mode == "weak" else batch / num_hosts
            if own < 1:
                break
            seconds = step_s(fits.computing.at(own), buckets, num_hosts, fits.network) + fits.engine_s
            rate = own * per_host * num_hosts / seconds
            one = rows[0].samples_per_s if rows else rate
            rows.append(Rate(mode, num_hosts, round(own), seconds, rate, rate / (num_hosts * one)))
        found[mode] = rows
    return found
