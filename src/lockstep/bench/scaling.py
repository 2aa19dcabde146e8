"""`lockstep bench scaling`: strong and weak scaling of training, on 1 to N ranks of this machine.

Compares a step of Lockstep's engine with one of torch's DistributedDataParallel on gloo, and with one that does not
communicate, which is the upper bound for this number of ranks, as they share cores and memory bandwidth.

The command imports this module to parse options, so only `measure` imports torch.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from lockstep.bench import stats
from lockstep.bench.pages import Block, Table, format_seconds, three_digits
from lockstep.bench.results import Result, Series
from lockstep.bench.session import Session
from lockstep.bench.words import choose
from lockstep.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import nn

    from lockstep.bench.ranks import Job

__all__ = ["DESCRIPTION", "SUMMARY", "Rate", "add_arguments", "blocks", "draw", "measure", "measure_steps", "rates"]

SUMMARY = "strong and weak scaling of training, on 1 to N ranks"
DESCRIPTION = """\
Train on 1, 2, 4 … N ranks of this machine, with the same batch on each rank (weak) and with one batch over all
(strong); compare with torch's engine on gloo, and with the same steps without communication.
"""

RECIPES = ("digits", "imagenet")
_NUM_CLASSES = 10
_WARM_UP_STEPS = 3
_OURS, _TORCHS, _ALONE = "lockstep", "torch DDP on gloo", "no communication"
_MODES = {"weak": "weak: each rank has the batch", "strong": "strong: all ranks share the batch"}
_COLOURS = {_OURS: "vermilion", _TORCHS: "blue", _ALONE: "grey"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options to `parser`."""
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--recipe", default="digits", help="digits, or imagenet: ResNet-18 at 64 pixels (default: digits)"
    )
    group.add_argument("--batch", type=int, metavar="N", help="samples per rank (default: 64; imagenet: 16)")


# ---- measuring -----------------------------------------------------------------------------------


def measure(options: argparse.Namespace, session: Session) -> None:
    """Measure as requested by the options.

    Raises:
        InputError: an option is invalid; says what to write.
        RankFailed: a rank failed.
    """
    (recipe,) = choose(options.recipe, RECIPES, "recipe", only_one=True)
    batch = options.batch if options.batch is not None else 64 if recipe == "digits" else 16
    if batch < 1:
        raise InputError(f"--batch must be at least 1, got {batch}")
    session.settings.update(recipe=recipe, batch=batch, threads_per_rank=1)
    sizes = _world_sizes(session.nproc)
    num_passes = 1 if session.quick else 2
    # Two passes, so that a noisy minute does not affect just one number of ranks.
    for number in range(num_passes):
        for n in sizes:
            if session.left_s <= 0:
                session.skip(f"{n} ranks, pass {number + 1}", "skipped: out of time; raise --budget")
                continue
            session.progress.show(f"pass {number + 1}: {n} ranks")
            _measure_ranks(session, recipe, sorted({batch, max(1, batch // n)}), n, num_passes * len(sizes))


def _world_sizes(nproc: int) -> list[int]:
    """1, 2, 4 … up to N, and N itself."""
    return sorted({*(1 << power for power in range(nproc.bit_length())), nproc} - {0})


def _measure_ranks(session: Session, recipe: str, batches: Sequence[int], n: int, num_runs: int) -> None:
    from lockstep.bench.harness import Budget
    from lockstep.bench.ranks import run_ranks

    earlier = {_key_of(one): one for one in session.series}

    def add(found: Sequence[dict[str, Any]]) -> None:
        for one in (Series(**item) for item in found):
            before = earlier.get(_key_of(one))
            samples = one.samples_s if before is None else [*before.samples_s, *one.samples_s]
            session.add(Series(one.parameters, one.contestant, one.iterations, samples))

    if session.quick:
        budget = Budget(seconds=0.05, sample_s=0.002, min_rounds=2, max_rounds=3, sweeps=1)
    else:
        seconds = max(0.05, 0.6 * session.budget_s / num_runs / (3 * len(batches)))
        budget = Budget(seconds=seconds, sample_s=min(0.02, seconds / 8), min_rounds=3, max_rounds=60, sweeps=1)
    job = {"recipe": recipe, "batches": list(batches), "budget": asdict(budget), "seconds": session.left_s}
    run_ranks(measure_steps, n, job, threads=1, timeout_s=120 + 2 * session.budget_s, on_part=add)


def _key_of(series: Series) -> tuple[object, ...]:
    return series.contestant, *sorted(series.parameters.items())


def measure_steps(job: Job) -> object:
    """The function of each rank; the default group is gloo.

    Args:
        job: `recipe`, `batches` (per rank), `budget`, `seconds` after which nothing more is started.

    Returns:
        Series, by number of ranks and batch: a step of each contestant.
    """
    import torch
    import torch.distributed as dist

    import lockstep
    import lockstep.comm.backend  # registers the backend
    from lockstep.bench.harness import Budget, Configuration, Contestant
    from lockstep.bench.harness import measure as measure_configurations
    from lockstep.bench.ranks import tell

    group = dist.new_group(backend="lockstep")
    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {
        _OURS: lambda model: lockstep.DistributedDataParallel(model, process_group=group),
        _TORCHS: torch.nn.parallel.DistributedDataParallel,
        _ALONE: lambda model: model,
    }
    model, shape = _build(str(job["recipe"]))
    torch.manual_seed(1 + dist.get_rank())
    configurations = []
    for batch in cast("list[int]", job["batches"]):
        steps = {name: _make_step(wrap(copy.deepcopy(model)), shape, batch) for name, wrap in wraps.items()}
        for step in (each for each in steps.values() for _ in range(_WARM_UP_STEPS)):
            step()
        contestants = [Contestant(name, step) for name, step in steps.items()]
        configurations.append(Configuration({"world_size": dist.get_world_size(), "batch": batch}, contestants))
    started, seconds = time.monotonic(), float(str(job["seconds"]))
    found = measure_configurations(
        configurations,
        Budget(**cast("dict[str, Any]", job["budget"])),
        left_s=lambda: seconds - (time.monotonic() - started),
        report=lambda series: tell([asdict(one) for one in series]),
    )
    return [asdict(one) for one in found]


def _build(recipe: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A recipe's model, with the same weights on all ranks, and the shape of a sample."""
    import torch

    torch.manual_seed(0)
    if recipe == "digits":
        from lockstep.recipes.digits.task import DigitsNet

        return DigitsNet(), (1, 8, 8)
    from lockstep.recipes.imagenet.models import create_model

    return create_model("resnet18", _NUM_CLASSES), (3, 64, 64)


def _make_step(model: nn.Module, shape: tuple[int, ...], batch: int) -> Callable[[], None]:
    """A training step on `batch` random samples per rank."""
    import torch
    from torch.nn.functional import cross_entropy

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, labels = torch.randn((batch, *shape)), torch.randint(_NUM_CLASSES, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


# ---- tables and plot of a result -----------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """The rate of training on a number of ranks.

    Attributes:
        mode: "weak" (each rank has a batch) or "strong" (all ranks share a batch).
        contestant: name of the contestant.
        world_size: number of ranks.
        batch: samples per rank.
        step_s: median time of a step.
        spread_s: its 10th and 90th percentile.
        samples_per_s: samples per second, over all ranks.
        efficiency: rate of N ranks, relative to N times the rate of one.
    """

    mode: str
    contestant: str
    world_size: int
    batch: int
    step_s: float
    spread_s: tuple[float, float]
    samples_per_s: float
    efficiency: float


def rates(result: Result) -> list[Rate]:
    """Rates in weak, then strong scaling, by number of ranks; only those measured."""
    batch = int(cast(int, result.settings["batch"]))
    samples = {
        (one.contestant, int(one.parameters["world_size"]), int(one.parameters["batch"])): one.samples_s
        for one in result.series
    }
    found = []
    for mode in _MODES:
        for n in sorted({world_size for _, world_size, _ in samples}):
            own = batch if mode == "weak" else max(1, batch // n)
            for name in _COLOURS:
                of_one, of_all = samples.get((name, 1, batch)), samples.get((name, n, own))
                if of_one is None or of_all is None:
                    continue
                seconds = stats.median(of_all)
                rate, rate_of_one = own * n / seconds, batch / stats.median(of_one)
                spread = stats.percentiles(of_all)
                found.append(Rate(mode, name, n, own, seconds, spread, rate, rate / (n * rate_of_one)))
    return found


def blocks(result: Result) -> list[Block]:
    """A table per mode."""
    found: list[Block] = [
        f"Recipe {result.settings['recipe']}, batch {result.settings['batch']}, one thread a rank. Times are medians."
    ]
    header = ["ranks", "engine", "batch a rank", "step", "10–90 %", "samples/s", "efficiency"]
    for mode, caption in _MODES.items():
        rows = [_row_of(rate) for rate in rates(result) if rate.mode == mode]
        cores = f"This machine has {result.environment.cores} cores: more ranks share them"
        found += [f"## {mode.capitalize()}", Table(f"{caption}. {cores}.", header, rows)]
    if result.skipped:
        found += ["## Not measured", "\n".join(f"- {one.contestant}: {one.reason}" for one in result.skipped)]
    return found


def _row_of(rate: Rate) -> list[str]:
    spread = "–".join(map(format_seconds, rate.spread_s))
    speed, efficiency = three_digits(rate.samples_per_s), f"{100 * rate.efficiency:.0f}%"
    step = format_seconds(rate.step_s)
    return [str(rate.world_size), rate.contestant, str(rate.batch), step, spread, speed, efficiency]


def draw(result: Result) -> Figure:
    """Plot rates over ranks, weak and strong. Needs matplotlib."""
    from lockstep.bench.figures import new_figure

    figure = new_figure(9.0, 4.4, f"scaling: {result.settings['recipe']}")
    for axes, mode in zip(figure.subplots(1, 2), _MODES, strict=True):
        _draw_rates(axes, [rate for rate in rates(result) if rate.mode == mode], _MODES[mode])
    return figure


def _draw_rates(axes: Axes, found: Sequence[Rate], title: str) -> None:
    from lockstep.bench.figures import GRID, PALETTE, tidy

    axes.set_title(title if found else f"{title}: nothing", fontsize=10)
    for name in dict.fromkeys(rate.contestant for rate in found):
        own = [rate for rate in found if rate.contestant == name]
        axes.plot(
            [rate.world_size for rate in own],
            [rate.samples_per_s for rate in own],
            "-o",
            color=PALETTE[_COLOURS[name]],
            label=name,
            markersize=4,
        )
    if found:
        sizes = sorted({rate.world_size for rate in found})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)
    axes.set_xlabel("ranks")
    axes.set_ylabel("samples/s")
    axes.grid(color=GRID, linewidth=0.7)
    tidy(axes)
