"""Tables of a result of `bench strategies`: times, parts of a step, losses, and which way is fastest.

All are computed from the stored samples; docs/bench.md explains the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.bench import stats
from lockstep.bench.pages import Block, Table, format_bytes, format_seconds, three_digits
from lockstep.bench.results import Result
from lockstep.bench.stats import Estimate
from lockstep.bench.strategies.ways import ALL_THREADS, BASE, OURS, PARTS, PEER, SINGLE, WAYS

__all__ = ["SEEDS", "View", "blocks"]

# Published times of the same comparison: seconds of ImageNet training on four V100s.
SEEDS = {
    "dp": ("DataParallel", 4138.3),
    "horovod": ("Horovod", 1200.3),
    "ddp": ("Distributed", 1188.5),
    "apex": ("Apex", 1186.5),
}

_REFERENCE = "torch_ddp"
# For the first epoch, because rounding grows with every step, and errors of a way show at once.
_TOLERANCES = {"float32": 1e-3, "float64": 1e-9}
_MIB = 1024 * 1024


@dataclass(frozen=True)
class View:
    """A result, way by way."""

    result: Result

    @property
    def names(self) -> list[str]:
        """The ways that were measured, in the order of `WAYS`."""
        measured = {series.contestant for series in self.result.series}
        return [name for name in WAYS if name in measured]

    def samples(self, name: str, measure: str) -> list[float]:
        """The samples of a measure, one per round: seconds of an epoch, or of a part of a step; may be empty."""
        return self.result.samples(name, measure=measure) or []

    def epoch(self, name: str) -> list[float]:
        """Seconds per epoch, by round."""
        return self.samples(name, "epoch")

    def step(self, name: str, prefix: str = "") -> list[float]:
        """Seconds per step, over all parts, by round."""
        return [sum(parts) for parts in zip(*(self.samples(name, prefix + part) for part in PARTS), strict=True)]

    def is_split(self, name: str) -> bool:
        """Whether the way was also measured without its communication."""
        return bool(self.samples(name, "alone_epoch"))

    def part(self, name: str, part: str) -> list[float]:
        """Seconds of a part of a step, without communication."""
        return self.samples(name, f"alone_{part}" if self.is_split(name) else part)

    def exposed(self, name: str) -> Estimate:
        """Seconds of a step that communication adds."""
        return stats.bootstrap(lambda whole, alone: whole - alone, self.step(name), self.step(name, "alone_"))

    def fact(self, name: str, fact: str) -> float | None:
        """A value other than times."""
        for series in self.result.series:
            if series.contestant == name and fact in series.facts:
                value = series.facts[fact]
                return value if isinstance(value, int | float) else None
        return None

    def losses(self, name: str) -> list[float]:
        """The mean training loss of each epoch."""
        for series in self.result.series:
            losses = series.facts.get("losses")
            if series.contestant == name and isinstance(losses, list):
                return losses
        return []

    def differences(self, name: str) -> list[float]:
        """Relative difference between the loss of each epoch and that of `single`."""
        pairs = zip(self.losses(name), self.losses(SINGLE), strict=False)
        return [abs(own - expected) / abs(expected) for own, expected in pairs]

    def agrees(self, name: str) -> bool:
        """Whether the way learns the same as one process, judged by the first epoch."""
        return all(difference <= self.tolerance for difference in self.differences(name)[:1])

    @property
    def tolerance(self) -> float:
        """Largest relative difference allowed between losses of the first epoch."""
        task = self.result.settings["task"]
        assert isinstance(task, dict)
        return _TOLERANCES[task["dtype"]]

    @property
    def has_spread(self) -> bool:
        """Whether every way has two samples or more, so that there is a spread."""
        return all(len(self.epoch(name)) > 1 for name in self.names)

    def times_of(self, estimate: Estimate) -> str:
        """A ratio, with its interval if there is a spread."""
        value, low, high = (three_digits(number) for number in (estimate.value, estimate.low, estimate.high))
        return f"{value}x [{low}, {high}]" if self.has_spread else f"{value}x"

    @property
    def nproc(self) -> int:
        """Number of ranks, of ways with several."""
        return int(str(self.result.settings["nproc"]))


def blocks(result: Result) -> list[Block]:
    """The page of a result."""
    view = View(result)
    found: list[Block] = [_heading(view), _times(view), *_verdicts(view), "## Where a step goes", _split(view)]
    found += ["## Results of training", _learned(view), *_disagreements(view)]
    found += ["## Memory and start", _resources(view), "## Compared with published results", _seeds(view)]
    if result.skipped:
        lines = [f"- `{one.contestant}` ({WAYS[one.contestant].label}): {one.reason}" for one in result.skipped]
        found += ["## Not measured", "\n".join(lines)]
    return found


def _heading(view: View) -> str:
    settings = view.result.settings
    task = settings["task"]
    assert isinstance(task, dict)
    model = "DigitsNet" if task["recipe"] == "digits" else task["arch"]
    rounds = len(view.epoch(SINGLE))
    ranks, threads = _count(view.nproc, "rank"), _count(int(str(settings["threads_per_rank"])), "thread")
    epoch = f"{view.fact(SINGLE, 'samples_per_epoch'):,.0f} images in {view.fact(SINGLE, 'steps_per_epoch'):.0f} steps"
    if "steps_at_most" in settings:
        epoch += ", limited by the time"
    return (
        f"{task['recipe']}: {model} ({settings['parameters']:,} parameters, {task['dtype']}) on {settings['device']}; "
        f"{ranks} with {threads} each, a global batch of {task['batch_size']}, an epoch of {epoch}; "
        f"{_count(rounds, 'round')} after a warm-up."
    )


def _times(view: View) -> Table:
    rows = []
    for name in view.names:
        epoch, single, reference = view.epoch(name), view.epoch(SINGLE), view.epoch(_REFERENCE)
        speedup = stats.ratio(single, epoch)
        several = name not in (SINGLE,)
        samples_per_s = (view.fact(name, "samples_per_epoch") or 0) / stats.median(epoch)
        rows.append(
            [
                _label(name),
                _with_spread(epoch),
                f"{samples_per_s:,.0f}",
                view.times_of(speedup) if several else "1",
                f"{speedup.value / view.nproc:.0%}" if several else "–",
                view.times_of(stats.ratio(reference, epoch)) if reference and name != _REFERENCE else "–",
            ]
        )
    header = ["way", "epoch", "samples/s", "as fast as `single`", "of the ideal", f"as fast as `{_REFERENCE}`"]
    caption = (
        "Medians, with 10th to 90th percentile, or 95% bootstrap intervals in brackets. The ideal is "
        f"{view.nproc} times as fast as `single`."
    )
    return Table(caption, header, rows)


def _split(view: View) -> Table:
    rows = []
    for name in view.names:
        step = stats.median(view.step(name))
        cells = [_label(name), format_seconds(step)]
        cells += [format_seconds(stats.median(view.part(name, part))) for part in PARTS]
        if view.is_split(name):
            exposed = view.exposed(name)
            bracket = f" [{_signed(exposed.low)}, {_signed(exposed.high)}]" if view.has_spread else ""
            cells += [f"{_signed(exposed.value)}{bracket}", f"{exposed.value / step:.0%}"]
        elif WAYS[name].kind == BASE:
            cells += ["none", "–"]
        else:
            cells += ["in forward and backward", "–"]
        rows.append(cells)
    header = ["way", "step", *PARTS, "communication exposed", "of a step"]
    caption = (
        "Medians of a step, each a mean over the steps of an epoch and over ranks. For ways with several ranks, the "
        "parts are those of the same step without communication, in the same processes; the additional time of the "
        "whole step is the communication exposed."
    )
    return Table(caption, header, rows)


def _learned(view: View) -> Table:
    rows = []
    for name in view.names:
        differences, accuracy = view.differences(name), view.fact(name, "held_out_accuracy")
        losses, held_out = view.losses(name), view.fact(name, "held_out_loss")
        rows.append(
            [
                _label(name),
                f"{losses[-1]:.6f}" if losses else "–",
                "–" if not differences or name == SINGLE else f"{differences[0]:.1e}",
                "–" if not differences or name == SINGLE else f"{differences[-1]:.1e}",
                "–" if held_out is None else f"{held_out:.6f}",
                "–" if accuracy is None else f"{accuracy:.2%}",
                "yes" if view.agrees(name) else "**NO**",
            ]
        )
    epochs = max(len(view.losses(name)) for name in view.names)
    header = ["way", "last training loss", "first epoch off by", "last epoch off by", "held-out loss", "accuracy"]
    caption = (
        f'After {_count(epochs, "epoch")} from the same weights. "Off by" is the relative difference between '
        f"the training loss and that of `single`. In the first epoch, up to {view.tolerance:g} counts as rounding, "
        "which grows with every later step, also for one process with a different number of threads."
    )
    return Table(caption, [*header, "the same"], rows)


def _disagreements(view: View) -> list[Block]:
    wrong = [name for name in view.names if not view.agrees(name)]
    names = " and ".join(f"`{name}`" for name in wrong)
    return [f"**{names} did not learn the same as one process.**"] if wrong else []


def _resources(view: View) -> Table:
    rows = []
    has_gpu = any(view.fact(name, "gpu_peak_bytes") for name in view.names)
    for name in view.names:
        row = [_label(name), f"{view.fact(name, 'processes') or 1:.0f}", _mebibytes(view.fact(name, "peak_bytes"))]
        row += [_mebibytes(view.fact(name, "gpu_peak_bytes"))] if has_gpu else []
        rows.append([*row, format_seconds(view.fact(name, "start_s") or 0)])
    gpu = ["peak memory of a GPU"] if has_gpu else []
    caption = (
        "Resident memory of the largest rank in its first epoch, including shared memory. Start is the time from the "
        "command until ranks are ready, measured once."
    )
    return Table(caption, ["way", "processes", "peak memory of a rank", *gpu, "start"], rows)


def _seeds(view: View) -> Table:
    reference = SEEDS["ddp"][1]
    rows = []
    for name, (label, seconds) in SEEDS.items():
        own, base = view.epoch(name), view.epoch("ddp")
        here = "–" if not own or not base else "1" if name == "ddp" else view.times_of(stats.ratio(own, base))
        rows.append([label, f"{seconds:,.1f} s", f"{seconds / reference:.3f}x", f"`{name}`", here])
    caption = (
        "Time relative to Distributed. That the three ways with a process per device are equally fast should hold "
        "on other machines; the loss of DataParallel depends on how its devices are connected."
    )
    return Table(caption, ["way", "4 V100s, ImageNet", "to Distributed", "here", "to `ddp`, here"], rows)


def _verdicts(view: View) -> list[Block]:
    """Which way is fastest; and why one of Lockstep's is slower than torch's."""
    ours = [name for name in view.names if WAYS[name].kind == OURS]
    peers = [name for name in view.names if WAYS[name].kind == PEER]
    if not ours or not peers:
        return []
    if not view.has_spread:
        return ["Only one round was measured, so ways are not ranked: raise `--budget` or pass fewer `--ways`."]
    best, rival = (min(names, key=lambda name: stats.median(view.epoch(name))) for names in (ours, peers))
    times = stats.ratio(view.epoch(rival), view.epoch(best))
    found: list[Block] = []
    if times.low > 1:
        found.append(
            f"**Lockstep's `{best}` is the fastest:** `{rival}`, the fastest of the others, takes "
            f"{view.times_of(times)} of its time."
        )
    elif times.high >= 1:
        found.append(
            f"**Lockstep's `{best}` and `{rival}`, the fastest of the others, cannot be told apart:** the latter takes "
            f"{view.times_of(times)} of the former's time."
        )
    else:
        found.append(
            f"**`{rival}` is faster than Lockstep's fastest, `{best}`:** it takes {view.times_of(times)} of its time. "
            f"{_why(view, best, rival)}"
        )
    slower = [name for name in ours if name not in (best,) and _is_slower(view, name, best)]
    lines = [
        f"- `{name}` takes {view.times_of(_ratio(view, name, best))} of the time of `{best}`. {_why(view, name, best)}"
        for name in slower
    ]
    threads = view.epoch(ALL_THREADS)
    if threads and stats.ratio(view.epoch(best), threads).low > 1:
        times = _ratio(view, ALL_THREADS, best)
        lines.append(
            f"- One process with threads on all cores takes {view.times_of(times)} of the time of `{best}`: "
            "for this model on this machine, threads are faster than any averaging."
        )
    return [*found, "\n".join(lines)] if lines else found


def _is_slower(view: View, name: str, other: str) -> bool:
    return _ratio(view, name, other).low > 1


def _ratio(view: View, name: str, other: str) -> Estimate:
    return stats.ratio(view.epoch(name), view.epoch(other))


def _why(view: View, slow: str, fast: str) -> str:
    """The parts of a step in which one way takes longer than another, largest first; and whether communication or
    computation takes longer, if both were measured without communication.
    """
    more = {part: stats.median(view.samples(slow, part)) - stats.median(view.samples(fast, part)) for part in PARTS}
    longer = sorted((part for part in PARTS if more[part] > 0), key=lambda part: -more[part])
    if not longer:
        return "No part of its steps takes longer; ranks wait for each other between epochs."
    words = "In a step: " + ", ".join(f"{part} {_signed(more[part])}" for part in longer)
    if not (view.is_split(slow) and view.is_split(fast)):
        return f"{words}."
    alone = stats.median(view.step(slow, "alone_")) - stats.median(view.step(fast, "alone_"))
    exposed = view.exposed(slow).value - view.exposed(fast).value
    return (
        f"{words}. Without communication the step differs by {_signed(alone)}, communication exposed by "
        f"{_signed(exposed)}."
    )


def _label(name: str) -> str:
    text = f"`{name}`"
    return f"**{text}**" if WAYS[name].kind == OURS else text


def _with_spread(samples: Sequence[float]) -> str:
    if len(samples) < 2:
        return format_seconds(stats.median(samples))
    low, high = stats.percentiles(samples)
    return f"{format_seconds(stats.median(samples))} ({format_seconds(low)} – {format_seconds(high)})"


def _signed(seconds: float) -> str:
    return f"{'−' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _mebibytes(count: float | None) -> str:
    return "–" if not count else format_bytes(round(count / _MIB) * _MIB)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
