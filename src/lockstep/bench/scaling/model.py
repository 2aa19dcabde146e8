"""How long a training step takes on many hosts: an alpha-beta-gamma model. Pure functions, without torch.

[Note: model] *alpha* is the latency of a message, *beta* the time per byte, *gamma* the time per sample. Each is fitted
to measurements that are not the check::

    link       a curve            half a round trip of m bytes between one rank on each of two hosts
    host       alpha + beta m     all_reduce of m bytes by the r ranks of one host
    computing  fixed + gamma b    forward, backward and optimizer of b samples, r ranks at once, nobody communicating

The link is no line: small messages and large ones go different ways, and the large ones need a reply before they begin.
So between the sizes that were measured it is straight, and beyond the largest it continues as between the last two.

An all_reduce of m bytes over H hosts goes through the stages of `comm/hosts`: ranks tell each other what they have
come for (one latency of the link with up to 3 ranks, else one for each step up a tree and down again), each host adds
up, hosts exchange. Up to 4 KiB, less from six ranks on, tensors come with what ranks tell each other, every rank's to
every host: r H (H - 1) m bytes on a link. Up to 16 KiB the stages follow each other, and every rank sends its host's
sum to its like on each other host: r (H - 1) m bytes; with 2, 4, 8, … hosts up to 64 KiB / r, and only to log2 H of
them, one after the other. Larger tensors cross in channels, so that with 2 hosts each byte crosses once each way,
with more 2 (H - 1) / H of them in two hops, or in 2 log2 H hops where partners halve what they have; beyond 2 MiB
hosts form a ring, of 2 (H - 1) hops. They go in k pieces, and while one is on the link, another is in the host::

    wire  = hops * link(share * m)      hops 1, share 1 for H = 2; in a ring hops 2 (H - 1), share 1 / H
    inner = alpha_host + beta_host * m
    all_reduce = told + max(wire, inner) + min(wire, inner) / k      told: link(0) for each time that ranks tell

A step computes forward, then backward. The engine reduces a bucket of gradients as soon as it is full, between hosts
during the backward pass, on one host when it is over; buckets follow each other. Gradients are taken to come
evenly over the backward pass. Then the optimizer steps.

Where all hosts share one machine's cores, `link`, `host` and what ranks tell each other are measured with all ranks at
once (`Network.told_s`).

What it leaves out: the processor time that communication takes from computing, messages that wait for each other at a
host with many peers, switches that are shared, and hosts that are not equally fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.bench import stats
from lockstep.comm.hosts.layout import (
    halved_bytes,
    is_summed_by_first_ranks,
    num_partners,
    num_pieces_of_sum,
    redundant_bytes,
)
from lockstep.comm.messages.arrival import attachment_bytes, num_hops

__all__ = [
    "Computing",
    "Curve",
    "Line",
    "Network",
    "all_reduce_s",
    "fit_curve",
    "fit_line",
    "step_on_one_host_s",
    "step_s",
]


@dataclass(frozen=True)
class Line:
    """A time that grows with something.

    Attributes:
        fixed_s: at nothing.
        per_unit_s: for each byte or sample.
    """

    fixed_s: float
    per_unit_s: float

    def at(self, amount: float) -> float:
        """Seconds for so many bytes or samples."""
        return self.fixed_s + self.per_unit_s * amount

    def times(self, factor: float) -> Line:
        """The same, so many times as long."""
        return Line(self.fixed_s * factor, self.per_unit_s * factor)


def fit_line(samples: Mapping[int, Sequence[float]]) -> Line:
    """The line nearest to the medians, each deviation counted relative to its time; neither part is negative.

    Args:
        samples: seconds, by bytes or samples.

    Raises:
        ValueError: there are no samples.

    >>> fit_line({0: [1.0], 10: [3.0], 20: [5.0]})
    Line(fixed_s=1.0, per_unit_s=0.2)
    """
    if not samples:
        raise ValueError("a line needs at least one point")
    amounts = np.array(list(samples), dtype=np.float64)
    times = np.array([stats.median(values) for values in samples.values()])
    columns = {"fixed": 1 / times, "per_unit": amounts / times}
    names = ["fixed", "per_unit"] if len(times) > 1 else ["fixed"]
    found: dict[str, float] = {}
    while names:
        matrix = np.stack([columns[name] for name in names], axis=1)
        scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
        solution = np.linalg.lstsq(matrix / scale, np.ones(len(times)), rcond=None)[0] / scale
        found = {name: float(f"{value:.12g}") for name, value in zip(names, solution, strict=True)}
        negative = [name for name in names if found[name] < 0]
        if not negative:
            break
        names = [name for name in names if name not in negative[:1]]
    return Line(found.get("fixed", 0.0), found.get("per_unit", 0.0))


@dataclass(frozen=True)
class Curve:
    """A time that grows with something, but not evenly.

    Attributes:
        points: amounts, each larger than the one before, with their seconds, none less than the one before; at least 2.
    """

    points: tuple[tuple[float, float], ...]

    @property
    def per_unit_s(self) -> float:
        """Seconds for each byte or sample, of large amounts."""
        (amount, seconds), (last, last_s) = self.points[-2:]
        return (last_s - seconds) / (last - amount)

    @property
    def fixed_s(self) -> float:
        """Seconds at nothing: those of the smallest amount."""
        return self.points[0][1]

    def at(self, amount: float) -> float:
        """Seconds for so many bytes or samples.

        >>> Curve(((10, 1.0), (20, 1.5), (30, 4.0))).at(15)
        1.25
        >>> Curve(((10, 1.0), (20, 1.5), (30, 4.0))).at(40)
        6.5
        """
        last, last_s = self.points[-1]
        if amount > last:
            return last_s + (amount - last) * self.per_unit_s
        amounts, seconds = np.array(self.points).T
        return float(np.interp(amount, amounts, seconds))


def fit_curve(samples: Mapping[int, Sequence[float]]) -> Curve:
    """The curve through the medians, each no less than that of a smaller amount.

    Args:
        samples: seconds, by bytes or samples.

    Raises:
        ValueError: there are fewer than two.

    >>> fit_curve({0: [1.0], 10: [0.8], 20: [5.0]})
    Curve(points=((0, 1.0), (10, 1.0), (20, 5.0)))
    """
    if len(samples) < 2:
        raise ValueError("a curve needs at least two points")
    medians = [stats.median(samples[amount]) for amount in sorted(samples)]
    return Curve(tuple(zip(sorted(samples), map(float, np.maximum.accumulate(medians)), strict=True)))


@dataclass(frozen=True)
class Network:
    """What communication costs.

    Attributes:
        link: a message between two hosts.
        host: an all_reduce among the ranks of one host.
        ranks_per_host: of those.
        told_s: seconds until ranks know what the others have come for, by messages of each to each; None where one
            message says how long.
    """

    link: Line | Curve
    host: Line
    ranks_per_host: int = 1
    told_s: float | None = None


@dataclass(frozen=True)
class Computing:
    """What a step costs that communicates with nobody.

    Attributes:
        forward, backward, optimizer: over the samples of one rank.
    """

    forward: Line
    backward: Line
    optimizer: Line

    def at(self, batch: float) -> tuple[float, float, float]:
        """Seconds of the three, none below zero."""
        return self.forward.at(batch), self.backward.at(batch), self.optimizer.at(batch)


def all_reduce_s(num_bytes: int, num_hosts: int, network: Network) -> float:
    """Seconds of an all_reduce. See [Note: model].

    Args:
        num_bytes: of each rank's tensor.
        num_hosts: at least 1.
        network: what messages cost.

    >>> network = Network(link=Line(1e-3, 8e-9), host=Line(1e-4, 1e-10))
    >>> round(all_reduce_s(1_000_000, 1, network), 6)
    0.0002
    >>> round(all_reduce_s(1_000_000, 2, network), 6)  # 1 ms, 1 ms + 8 ms on the link, 0.2 ms
    0.0102
    >>> round(all_reduce_s(1_000_000, 4, network), 6)  # 2 ms, 4 ms + 12 ms, 0.2 ms
    0.0182
    """
    inner = network.host.at(num_bytes)
    if num_hosts == 1:
        return inner
    of_each = network.ranks_per_host
    ranks = num_hosts * of_each
    hops = num_hops([range(host * of_each, (host + 1) * of_each) for host in range(num_hosts)])
    one = network.link.at(0)
    told = hops * one if network.told_s is None else network.told_s
    if num_bytes <= attachment_bytes(ranks):
        told_at_once = of_each**2 if hops == 1 else ranks  # ranks whose tensors go to a host in one message
        return told - one + network.link.at(told_at_once * (num_hosts - 1) * num_bytes)
    if num_bytes <= redundant_bytes(num_hosts, of_each):
        partners = num_partners(num_hosts)
        sums = partners * network.link.at(of_each * num_bytes)
        return told + inner + (sums if partners else network.link.at(of_each * (num_hosts - 1) * num_bytes))
    wire = _wire_s(num_bytes, num_hosts, network.link)
    return told + max(wire, inner) + min(wire, inner) / num_pieces_of_sum(num_bytes)


def _wire_s(num_bytes: int, num_hosts: int, link: Line | Curve) -> float:
    """Seconds on the links of an all_reduce between at least 2 hosts."""
    if is_summed_by_first_ranks(num_bytes):
        return 2 * (num_hosts - 1) * link.at(num_bytes / num_hosts)
    if num_bytes <= halved_bytes(num_hosts):
        return 2 * sum(link.at(num_bytes / 2**step) for step in range(1, num_partners(num_hosts) + 1))
    hops, share = (1, 1.0) if num_hosts == 2 else (2, (num_hosts - 1) / num_hosts)
    return hops * link.at(share * num_bytes)


def step_on_one_host_s(computing: tuple[float, float, float], buckets: Sequence[int], host: Line) -> float:
    """Seconds of a step of ranks that share one host: buckets are reduced when the backward pass is over.

    >>> round(step_on_one_host_s((1.0, 2.0, 0.5), [100, 100], Line(0.01, 0.001)), 6)
    3.72
    """
    return sum(computing) + sum(host.at(num_bytes) for num_bytes in buckets)


def step_s(computing: tuple[float, float, float], buckets: Sequence[int], num_hosts: int, network: Network) -> float:
    """Seconds of a step. See [Note: model].

    Args:
        computing: seconds of forward, backward and optimizer.
        buckets: bytes of each, in the order in which they are full.
        num_hosts: at least 1.
        network: what messages cost.

    >>> network = Network(Line(0.0, 0.0), Line(0.0, 0.0))
    >>> step_s((1.0, 2.0, 0.5), [100, 100], 2, network)
    3.5
    """
    if num_hosts == 1:
        return step_on_one_host_s(computing, buckets, network.host)
    forward, backward, optimizer = computing
    total = sum(buckets)
    filled, free_at = 0, 0.0
    for num_bytes in buckets:
        filled += num_bytes
        full_at = forward + backward * filled / total
        free_at = max(free_at, full_at) + all_reduce_s(num_bytes, num_hosts, network)
    return max(forward + backward, free_at) + optimizer
