"""Pictures generated from results, one per case. Drawn off screen; nothing global is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.report import (
    CONTESTANT_NAMES,
    HOROVOD_LIMIT,
    HOSTS_TARGETS,
    LAUNCH_NAMES,
    LISTERS,
    MODEL_NAMES,
    OVERHEAD_TARGETS,
    RECORD_LIMIT,
    ROWS_LIMIT,
    count_of_workers,
    hosts_of,
    hosts_samples,
    images_of_epoch,
    layouts_of,
    name_layout,
    name_sharded,
    rows_cases,
    sharded_cases,
)
from lockstep.bench import stats
from lockstep.bench.figures import GRID, new_figure, save, tidy
from lockstep.bench.pages import format_bytes, format_seconds
from lockstep.bench.results import Result
from lockstep.bench.stats import Estimate

__all__ = ["draw"]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {
    "gloo": "#D55E00",
    "torch": "#D55E00",
    "lockstep": "#0072B2",
    "lockstep_symmetric": "#009E73",
    "memcpy_one_rank": "#888888",
    "memcpy_all_ranks": "#888888",
    "lockstep_ddp": "#0072B2",
    "torch_ddp_lockstep": "#56B4E9",
    "torch_ddp_gloo": "#D55E00",
    "horovod": "#CC79A7",
    "sharded": "#009E73",
    "torch_zero_gloo": "#E69F00",
    "fsdp2_gloo": "#CC79A7",
    "lockstep_run": "#0072B2",
    "lockstep_run_init": "#009E73",
    "torchrun": "#D55E00",
    "every_rank": "#D55E00",
    "lockstep_again": "#009E73",
    "record": "#0072B2",
    "record_launched": "#009E73",
}
MARKERS = {"gloo": "s", "lockstep": "o", "lockstep_symmetric": "D", "memcpy_one_rank": "", "memcpy_all_ranks": ""}
_SIZE_COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00")
_RATIO_TARGET = 4
_ENGINES = ("lockstep_ddp", "torch_ddp_lockstep", "torch_ddp_gloo")
_BAR_WIDTH = 0.26
_TARGET_DASHES = (0, (3, 2))


def draw(result: Result, path: Path) -> None:
    """Draw the picture of a case into a PNG file."""
    save(_DRAWERS[result.case](result), result, path)


# ---------------------------------------------------------------- all_reduce


def _draw_all_reduce(result: Result) -> Figure:
    """Time over size above, gloo's multiple of Lockstep's time below; one column per world size."""
    world_sizes = [int(value) for value in result.values("world_size")]
    figure = new_figure(5.4 * len(world_sizes), 6.6, "all_reduce: time per call")
    grid = figure.subplots(2, len(world_sizes), sharex=True, sharey="row", squeeze=False, height_ratios=[1.6, 1])
    for column, world_size in enumerate(world_sizes):
        times, ratios = grid[0][column], grid[1][column]
        _plot_times(times, result, world_size)
        _plot_ratios(ratios, result, world_size)
        times.set_title(f"{world_size} ranks", fontsize=10)
        if column == 0:
            times.set_ylabel("time per call")
            ratios.set_ylabel("times as fast as gloo")
            times.legend(fontsize=8, frameon=False, loc="upper left")
    return figure


def _plot_times(axes: Axes, result: Result, world_size: int) -> None:
    """Median lines with bands from the 10th to the 90th percentile, on logarithmic axes."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name, marker in MARKERS.items():
        points = [
            (float(size), stats.median(samples), *stats.percentiles(samples))
            for size in result.values("bytes")
            if (samples := result.samples(name, world_size=world_size, bytes=size))
        ]
        if not points:
            continue
        sizes, medians, lows, highs = zip(*points, strict=True)
        style = "-" if marker else ("--" if name == "memcpy_one_rank" else ":")
        label = CONTESTANT_NAMES[name]
        axes.plot(sizes, medians, style, marker=marker, markersize=4, color=COLOURS[name], label=label, linewidth=1.5)
        if marker:
            axes.fill_between(sizes, lows, highs, color=COLOURS[name], alpha=0.18, linewidth=0)
    axes.grid(color=GRID, linewidth=0.7)
    axes.yaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds).replace(".00 ", " ").replace(".0 ", " "))
    tidy(axes)


def _plot_ratios(axes: Axes, result: Result, world_size: int) -> None:
    """Ratio of medians with its bootstrap interval, gloo being 1."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name in ("lockstep", "lockstep_symmetric"):
        points = []
        for size in result.values("bytes"):
            gloo = result.samples("gloo", world_size=world_size, bytes=size)
            own = result.samples(name, world_size=world_size, bytes=size)
            if gloo and own:
                estimate = stats.ratio(gloo, own)
                points.append((float(size), estimate.value, estimate.low, estimate.high))
        if not points:
            continue
        sizes, values, lows, highs = zip(*points, strict=True)
        colour = COLOURS[name]
        axes.plot(sizes, values, "-", marker=MARKERS[name], markersize=4, color=colour, label=CONTESTANT_NAMES[name])
        axes.fill_between(sizes, lows, highs, color=colour, alpha=0.18, linewidth=0)
    axes.axhline(1, color=COLOURS["gloo"], linewidth=1.5)
    axes.axhline(_RATIO_TARGET, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(bottom=min(0.7, axes.get_ylim()[0]))
    for height, text, colour in ((1, "gloo", COLOURS["gloo"]), (_RATIO_TARGET, f"target {_RATIO_TARGET}x", "black")):
        _label_line(axes, height, text, colour)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_xlabel("tensor")
    sizes_shown = [int(size) for size in result.values("bytes")]
    axes.set_xticks(sizes_shown, [format_bytes(size) for size in sizes_shown], rotation=45, ha="right", fontsize=8)
    axes.minorticks_off()
    ticks = [1, 2, 4, 10, 20, 40, 100, 200]
    low, high = axes.get_ylim()
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, [f"{tick}x" for tick in shown])
    tidy(axes)


def _label_line(axes: Axes, height: float, text: str, colour: str) -> None:
    """Write beside a horizontal line what it stands for, at the left edge just below it."""
    place = axes.get_yaxis_transform()
    axes.annotate(text, (0, height), (3, -3), place, textcoords="offset points", va="top", fontsize=7.5, color=colour)


# ---------------------------------------------------------------- train_step


def _draw_train_step(result: Result) -> Figure:
    """What each engine adds to a step, in percent of the step without communication."""
    models = [str(value) for value in result.values("model")]
    figure = new_figure(8.6, 4.2, "train_step: what communication adds to a step, 2 ranks")
    axes = figure.subplots()
    for offset, engine in enumerate(_ENGINES):
        for position, model in enumerate(models):
            floor, samples = result.samples("none", model=model), result.samples(engine, model=model)
            if floor and samples:
                limit = OVERHEAD_TARGETS.get(model) if engine == "lockstep_ddp" else None
                centre = position + (offset - 1) * _BAR_WIDTH
                _plot_overhead(axes, centre, engine, stats.overhead(samples, floor), limit)
    handles = [Patch(color=COLOURS[engine], label=CONTESTANT_NAMES[engine]) for engine in _ENGINES]
    target = Line2D([], [], color="black", linewidth=1.4, linestyle=_TARGET_DASHES, label="target for lockstep DDP")
    axes.legend(handles=[*handles, target], fontsize=8, frameon=False)
    axes.axhline(0, color="black", linewidth=0.8)
    names = [f"{MODEL_NAMES.get(model, model)}\n{_floor_label(result, model)}" for model in models]
    axes.set_xticks(range(len(models)), names, fontsize=9)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")
    axes.set_ylabel("added to the step")
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.margins(y=0.12)
    tidy(axes)
    return figure


def _plot_overhead(axes: Axes, centre: float, engine: str, cost: Estimate, limit: float | None) -> None:
    """One bar with its interval, its number above, and a dashed line where the target lies."""
    value = 100 * cost.value
    errors = [[max(0.0, value - 100 * cost.low)], [max(0.0, 100 * cost.high - value)]]
    axes.bar(centre, value, _BAR_WIDTH * 0.92, color=COLOURS[engine])
    axes.errorbar(centre, value, errors, color="#333333", linewidth=1, capsize=3)
    if limit is not None:
        half = _BAR_WIDTH / 2
        axes.hlines(100 * limit, centre - half, centre + half, colors="black", linewidth=1.4, linestyles=_TARGET_DASHES)
    top = max(0.0, 100 * cost.high, 100 * (limit or 0.0))
    axes.annotate(f"{value:.1f}%", (centre, top), (0, 3), textcoords="offset points", ha="center", fontsize=8)


def _floor_label(result: Result, model: str) -> str:
    samples = result.samples("none", model=model)
    return f"{format_seconds(stats.median(samples))} without communication" if samples else ""


# ---------------------------------------------------------------- threads


def _draw_threads(result: Result) -> Figure:
    """Each engine's step in multiples of the bound, a group of bars for each model in each layout."""
    layouts = layouts_of(result)
    models = [str(value) for value in result.values("model")]
    figure = new_figure(8.6, 3.6, "threads: a step in multiples of computing and waiting for the slowest rank")
    panels = figure.subplots(1, len(layouts), sharey=True, squeeze=False)[0]
    for axes, (world_size, threads) in zip(panels, layouts, strict=True):
        for offset, engine in enumerate(_ENGINES):
            for position, model in enumerate(models):
                where = {"model": model, "world_size": world_size, "threads": threads}
                bound, samples = result.samples("bound", **where), result.samples(engine, **where)
                if bound and samples:
                    _plot_times_of_bound(
                        axes, position + (offset - 1) * _BAR_WIDTH, engine, stats.ratio(samples, bound)
                    )
        axes.axhline(1, color="black", linewidth=0.8, linestyle=_TARGET_DASHES)
        axes.set_title(name_layout(result, world_size, threads), fontsize=9)
        axes.set_xticks(range(len(models)), [MODEL_NAMES.get(model, model) for model in models], fontsize=7.5)
        axes.grid(axis="y", color=GRID, linewidth=0.7)
        axes.margins(y=0.12)
        tidy(axes)
    panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:.1f}x")
    handles = [Patch(color=COLOURS[engine], label=CONTESTANT_NAMES[engine]) for engine in _ENGINES]
    panels[0].legend(handles=handles, fontsize=7.5, frameon=False)
    return figure


def _plot_times_of_bound(axes: Axes, centre: float, engine: str, times: Estimate, width: float = _BAR_WIDTH) -> None:
    """One bar with its interval, and its number above."""
    axes.bar(centre, times.value, width * 0.92, color=COLOURS[engine])
    errors = [[max(0.0, times.value - times.low)], [max(0.0, times.high - times.value)]]
    axes.errorbar(centre, times.value, errors, color="#333333", linewidth=1, capsize=3)
    place = (centre, times.high)
    axes.annotate(f"{times.value:.2f}", place, (0, 3), textcoords="offset points", ha="center", fontsize=6)


# ---------------------------------------------------------------- sharded


def _draw_sharded(result: Result) -> Figure:
    """Each contestant's step in multiples of the bound, a group of bars for each case."""
    names = ("sharded", "lockstep_ddp", "torch_ddp_gloo", "torch_zero_gloo", "fsdp2_gloo")
    cases = sharded_cases(result)
    figure = new_figure(8.6, 3.6, "sharded: a step in multiples of computing and waiting for the slowest rank")
    axes = figure.subplots()
    width = 0.9 / len(names)
    for offset, name in enumerate(names):
        for position, case in enumerate(cases):
            bound, samples = result.samples("bound", **case), result.samples(name, **case)
            if bound and samples:
                centre = position + (offset - len(names) // 2) * width
                _plot_times_of_bound(axes, centre, name, stats.ratio(samples, bound), width)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=_TARGET_DASHES)
    axes.set_xticks(range(len(cases)), [name_sharded(result, case).replace(", ", "\n") for case in cases], fontsize=7)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.margins(x=0.02, y=0.2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1f}x")
    handles = [Patch(color=COLOURS[name], label=CONTESTANT_NAMES[name]) for name in names]
    axes.legend(handles=handles, fontsize=7, frameon=False, ncols=len(names), loc="upper center")
    tidy(axes)
    return figure


# ---------------------------------------------------------------- horovod


def _draw_horovod(result: Result) -> Figure:
    """A Horovod step in multiples of one with DDP, under a line at the target."""
    models = [str(value) for value in result.values("model")]
    figure = new_figure(6.4, 3.2, "horovod: its step beside lockstep DDP's, 2 ranks")
    axes = figure.subplots()
    for position, model in enumerate(models):
        own, ddp = result.samples("horovod", model=model), result.samples("lockstep_ddp", model=model)
        if own and ddp:
            times = stats.ratio(own, ddp)
            errors = [[times.value - times.low], [times.high - times.value]]
            axes.bar(position, times.value, _BAR_WIDTH, color=COLOURS["horovod"])
            axes.errorbar(position, times.value, errors, color="#333333", linewidth=1, capsize=3)
            place, text = (position, times.high), f"{times.value:.2f}x"
            axes.annotate(text, place, (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.axhline(HOROVOD_LIMIT, color="black", linewidth=1.4, linestyle=_TARGET_DASHES)
    axes.set_xticks(range(len(models)), [MODEL_NAMES.get(model, model) for model in models], fontsize=9)
    axes.set_ylabel("step time / DDP's")
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.margins(y=0.15)
    tidy(axes)
    return figure


# ---------------------------------------------------------------- startup


def _draw_startup(result: Result) -> Figure:
    """Every sample as a dot over the bar of its median."""
    figure = new_figure(8.6, 2.7, "startup: from the command line to the first finished all_reduce")
    bars = []
    for nproc in result.values("nproc"):
        peer = result.samples("torchrun", nproc=nproc)
        for name, label in LAUNCH_NAMES.items():
            bars.append((name, f"{label.replace('`', '')}\n{nproc} ranks", result.samples(name, nproc=nproc), peer))
    _draw_times(figure, bars, "torchrun")
    return figure


def _draw_times(
    figure: Figure, bars: Sequence[tuple[str, str, list[float] | None, list[float] | None]], rival: str
) -> None:
    """A bar for each contestant, label, samples and samples of the rival at the same."""
    axes = figure.subplots()
    labels: list[str] = []
    for name, label, samples, peer in bars:
        if not samples:
            continue
        position = len(labels)
        middle = stats.median(samples)
        axes.barh(position, middle, 0.62, color=COLOURS[name], alpha=0.85)
        spread = [position + 0.18 * (2 * (i % 4) / 3 - 1) for i in range(len(samples))]
        axes.scatter(samples, spread, s=12, color="black", alpha=0.55, linewidths=0, zorder=3)
        text = format_seconds(middle)
        if peer and name != rival:
            text += f", {stats.ratio(peer, samples).value:.2f}x as fast"
        axes.annotate(text, (0, position), (6, 0), textcoords="offset points", va="center", color="white")
        labels.append(label)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds")
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    tidy(axes)


# ---------------------------------------------------------------- record


def _draw_record(result: Result) -> Figure:
    """What each form of the record adds to the smallest all_reduce, in percent, under a line at the target."""
    figure = new_figure(6.4, 2.6, "record: what the flight record adds to an all_reduce of 4 B")
    axes = figure.subplots()
    labels: list[str] = []
    for world_size in result.values("world_size"):
        floor = result.samples("no_record", world_size=world_size, bytes=4)
        for name in ("record", "record_launched"):
            samples = result.samples(name, world_size=world_size, bytes=4)
            if not (floor and samples):
                continue
            cost = stats.overhead(samples, floor)
            value, position = 100 * cost.value, len(labels)
            errors = [[max(0.0, value - 100 * cost.low)], [max(0.0, 100 * cost.high - value)]]
            axes.barh(position, value, 0.62, xerr=errors, color=COLOURS[name], capsize=3)
            axes.annotate(f"{value:.1f}%", (max(value, 0.0), position), (12, 9), textcoords="offset points", fontsize=8)
            labels.append(f"{CONTESTANT_NAMES[name]}\n{world_size} ranks")
    axes.axvline(100 * RECORD_LIMIT, color="black", linewidth=1.4, linestyle=_TARGET_DASHES)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    tidy(axes)
    return figure


# ---------------------------------------------------------------- hosts


def _draw_hosts(result: Result) -> Figure:
    """How many times as fast as its rival each contestant is, with a tick at what it should be; and over more hosts."""
    shapes = hosts_of(result)
    title = "hosts: 2 hosts with 2 ranks each at 1 Gbit/s"
    figure = new_figure(12.8 if shapes else 6.4, 3.2, f"{title}; all_reduce over more" if shapes else title)
    axes = figure.subplots(1, 2, squeeze=False)[0][0] if shapes else figure.subplots()
    samples = {one.contestant: one.samples_s for one in result.series if "hosts" not in one.parameters}
    labels: list[str] = []
    for name, rival, limit in HOSTS_TARGETS:
        if name not in samples or rival not in samples:
            continue
        times = stats.ratio(samples[rival], samples[name])
        position = len(labels)
        errors = [[times.value - times.low], [times.high - times.value]]
        colour = COLOURS["lockstep_ddp"] if "ddp" in name else COLOURS["lockstep"]
        axes.barh(position, times.value, 0.62, xerr=errors, color=colour, capsize=3)
        axes.plot([limit, limit], [position - 0.4, position + 0.4], color="black", linewidth=1.6)
        axes.annotate(f"{times.value:.2f}x", (times.high, position), (6, -3), textcoords="offset points", fontsize=8)
        labels.append(f"{CONTESTANT_NAMES[name]}\nagainst {CONTESTANT_NAMES[rival]}")
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.margins(x=0.15)
    tidy(axes)
    if shapes:
        _draw_many_hosts(result, figure.axes[1])
    return figure


def _draw_many_hosts(result: Result, axes: Axes) -> None:
    """gloo's multiple of Lockstep's time by hosts and ranks; a line for each size, dashed on the limited network."""
    shapes = hosts_of(result)
    sizes = [
        size
        for size in map(int, result.values("bytes"))
        if any(hosts_samples(result, *shape, str(rate), size) for shape in shapes for rate in result.values("rate"))
    ]
    for size, colour in zip(sizes, _SIZE_COLOURS, strict=False):
        for rate in map(str, result.values("rate")):
            points = []
            for position, shape in enumerate(shapes):
                pair = hosts_samples(result, *shape, rate, size)
                if pair is not None:
                    points.append((position, stats.ratio(*pair).value))
            if points:
                style = "-o" if rate == "unlimited" else "--o"
                label = f"{format_bytes(size)}, {rate}"
                axes.plot(*zip(*points, strict=True), style, markersize=4, color=colour, label=label)
    axes.set_yscale("log")
    axes.axhline(1, color=COLOURS["gloo"], linewidth=1.5)
    axes.set_xticks(range(len(shapes)), [f"{hosts} x {ranks}" for hosts, ranks in shapes])
    axes.set_xlabel("hosts x ranks on each")
    axes.set_ylabel("gloo's time / lockstep's")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.legend(fontsize=7, frameon=False)
    tidy(axes)


# ---------------------------------------------------------------- contention


def _draw_contention(result: Result) -> Figure:
    """gloo's multiple of Lockstep's time over the number of busy neighbours; a column for each world size."""
    world_sizes = [int(value) for value in result.values("world_size")]
    figure = new_figure(2.6 * len(world_sizes) + 1.0, 3.6, "contention: all_reduce beside busy processes")
    row = figure.subplots(1, len(world_sizes), sharey=True, squeeze=False)[0]
    for axes, world_size in zip(row, world_sizes, strict=True):
        axes.set_yscale("log")
        for size, colour in zip(result.values("bytes"), _SIZE_COLOURS, strict=False):
            points = []
            for count in result.values("neighbours"):
                where: dict[str, int | str] = {"world_size": world_size, "bytes": size, "neighbours": count}
                gloo, own = result.samples("gloo", **where), result.samples("lockstep", **where)
                if gloo and own:
                    estimate = stats.ratio(gloo, own)
                    points.append((float(count), estimate.value, estimate.low, estimate.high))
            if points:
                counts, values, lows, highs = zip(*points, strict=True)
                axes.plot(counts, values, "-o", markersize=4, color=colour, label=format_bytes(int(size)))
                axes.fill_between(counts, lows, highs, color=colour, alpha=0.18, linewidth=0)
        axes.axhline(1, color=COLOURS["gloo"], linewidth=1.5)
        axes.set_title(f"{world_size} ranks", fontsize=10)
        axes.set_xlabel("busy processes")
        axes.set_xticks([int(count) for count in result.values("neighbours")])
        axes.grid(color=GRID, linewidth=0.7)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}x" if round(value) in (2, 3, 5) else "")
        tidy(axes)
    row[0].set_ylabel("times as fast as gloo")
    row[0].legend(fontsize=8, frameon=False)
    return figure


# ---------------------------------------------------------------- decode


def _draw_decode(result: Result) -> Figure:
    """Images per second of both loaders over the number of workers; a column for each size of the JPEGs."""
    sizes = [int(value) for value in result.values("pixels")]
    figure = new_figure(3.6 * len(sizes) + 0.6, 3.4, "decode: JPEGs read, decoded and augmented")
    row = figure.subplots(1, len(sizes), squeeze=False)[0]
    for axes, pixels in zip(row, sizes, strict=True):
        counts = [int(value) for value in result.values("workers")]
        images = images_of_epoch(result, pixels)
        for place, name in enumerate(("torch", "lockstep")):
            for position, workers in enumerate(counts):
                samples = result.samples(name, pixels=pixels, workers=workers)
                if not samples:
                    continue
                low, high = (images / seconds for seconds in stats.percentiles(samples)[::-1])
                rate = images / stats.median(samples)
                errors = [[max(0.0, rate - low)], [max(0.0, high - rate)]]
                x = position + (place - 0.5) * 0.38
                label = CONTESTANT_NAMES[name] if position == 0 else None
                axes.bar(x, rate, 0.36, yerr=errors, color=COLOURS[name], capsize=2, label=label)
        axes.set_title(f"{pixels} pixels", fontsize=10)
        axes.set_xticks(range(len(counts)), [str(count) for count in counts])
        axes.set_xlabel("worker processes")
        axes.grid(axis="y", color=GRID, linewidth=0.7)
        tidy(axes)
    row[0].set_ylabel("images per second")
    row[0].legend(fontsize=8, frameon=False)
    return figure


# ---------------------------------------------------------------- rows


def _draw_rows(result: Result) -> Figure:
    """The ratio of Lockstep's time to torch's, with its interval, for each data set and batch size."""
    cases = [(label.replace("`", ""), theirs, own) for label, theirs, own in rows_cases(result) if theirs and own]
    figure = new_figure(8.6, 0.9 + 0.36 * len(cases), "rows: how much longer lockstep's loader takes than torch's")
    axes = figure.subplots()
    for place, (_, theirs, own) in enumerate(cases):
        found = stats.ratio(own, theirs)
        axes.plot([found.low, found.high], [place, place], color=COLOURS["lockstep"], linewidth=2)
        axes.plot([found.value], [place], "o", color=COLOURS["lockstep"])
        axes.annotate(
            f"{found.value:.2f}x", (found.high, place), (6, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.axvline(1, color=COLOURS["torch"], linewidth=1)
    axes.axvline(ROWS_LIMIT, color="#444444", linewidth=1, linestyle=_TARGET_DASHES)
    axes.set_yticks(range(len(cases)), [label for label, _, _ in cases], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(stats.ratio(own, theirs).high for _, theirs, own in cases))
    axes.set_xlabel("time over torch's (solid line); the target is dashed")
    tidy(axes)
    return figure


# ---------------------------------------------------------------- epoch


def _draw_epoch(result: Result) -> Figure:
    """Every sample as a dot over the bar of its median; two bars for each number of workers."""
    counts = [int(value) for value in result.values("workers")]
    title = f"epoch: {result.settings['images']} JPEGs, {result.settings['world_size']} ranks"
    figure = new_figure(8.6, 0.8 + 1.0 * len(counts), title)
    bars = []
    for workers in counts:
        peer = result.samples("torch", workers=workers)
        for name in ("torch", "lockstep"):
            label = f"{name}, {count_of_workers(workers)}"
            bars.append((name, label, result.samples(name, workers=workers), peer))
    _draw_times(figure, bars, "torch")
    return figure


# ---------------------------------------------------------------- listing


def _draw_listing(result: Result) -> Figure:
    """Every sample as a dot over the bar of its median."""
    figure = new_figure(8.6, 2.0, f"listing: {result.settings['images']:,} images, at the start of a run of 2 ranks")
    peer = result.samples("every_rank")
    bars = [(name, label, result.samples(name), peer) for name, label in LISTERS.items()]
    _draw_times(figure, bars, "every_rank")
    return figure


_DRAWERS: dict[str, Callable[[Result], Figure]] = {
    "all_reduce": _draw_all_reduce,
    "train_step": _draw_train_step,
    "threads": _draw_threads,
    "sharded": _draw_sharded,
    "horovod": _draw_horovod,
    "startup": _draw_startup,
    "record": _draw_record,
    "hosts": _draw_hosts,
    "contention": _draw_contention,
    "decode": _draw_decode,
    "rows": _draw_rows,
    "epoch": _draw_epoch,
    "listing": _draw_listing,
}
