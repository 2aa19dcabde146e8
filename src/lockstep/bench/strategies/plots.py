"""The plot of `bench strategies`: published times, the same ways here, and the parts of a step."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lockstep.bench import stats
from lockstep.bench.figures import GRID, PALETTE, new_figure, tidy
from lockstep.bench.pages import format_seconds
from lockstep.bench.results import Result
from lockstep.bench.strategies.report import SEEDS, View
from lockstep.bench.strategies.ways import BASE, OURS, PARTS, PEER, SINGLE, WAYS

__all__ = ["draw"]

_COLOURS = {BASE: PALETTE["grey"], OURS: PALETTE["blue"], PEER: PALETTE["vermilion"]}
_KINDS = {OURS: "Lockstep", PEER: "others", BASE: "one process"}
_PART_COLOURS = dict(zip(PARTS, (PALETTE["yellow"], PALETTE["sky"], PALETTE["green"], PALETTE["purple"]), strict=True))
_EXPOSED = "communication exposed"


def draw(result: Result) -> Figure:
    """Draw three panels of horizontal bars, one per way."""
    view = View(result)
    task = result.settings["task"]
    assert isinstance(task, dict)
    height = 1.9 + 0.34 * max(len(view.names), len(SEEDS))
    figure = new_figure(
        13.5, height, f"strategies: {task['recipe']}, {view.nproc} ranks on {result.settings['device']}"
    )
    seeds, epochs, steps = figure.subplots(1, 3, width_ratios=[1, 1.5, 1.5])
    _draw_seeds(seeds)
    _draw_epochs(epochs, view)
    _draw_steps(steps, view)
    for axes in (seeds, epochs, steps):
        axes.invert_yaxis()
        axes.grid(axis="x", color=GRID, linewidth=0.7)
        tidy(axes)
    return figure


def _draw_seeds(axes: Axes) -> None:
    for position, (_, seconds) in enumerate(SEEDS.values()):
        axes.barh(position, seconds, 0.62, color=PALETTE["grey"])
        axes.annotate(f"{seconds:,.1f}", (seconds, position), (4, -3), textcoords="offset points", fontsize=8)
    axes.set_yticks(range(len(SEEDS)), [label for label, _ in SEEDS.values()], fontsize=8)
    axes.set_xlabel("seconds")
    axes.set_title("the seeds' own: ImageNet on 4 V100s", fontsize=9, pad=20)
    axes.margins(x=0.2)


def _draw_epochs(axes: Axes, view: View) -> None:
    for position, name in enumerate(view.names):
        samples = view.epoch(name)
        middle, (low, high) = stats.median(samples), stats.percentiles(samples)
        errors = [[middle - low], [high - middle]]
        axes.barh(position, middle, 0.62, xerr=errors, color=_COLOURS[WAYS[name].kind], capsize=2, ecolor="#333333")
        axes.annotate(format_seconds(middle), (high, position), (4, -3), textcoords="offset points", fontsize=8)
    axes.set_yticks(range(len(view.names)), view.names, fontsize=8)
    ideal = stats.median(view.epoch(SINGLE)) / view.nproc
    axes.axvline(ideal, color="black", linewidth=1.2, linestyle=(0, (3, 2)))
    axes.set_xlabel(f"seconds per epoch; dashed: single / {view.nproc}")
    axes.set_title("an epoch, here (median, 10th to 90th percentile)", fontsize=9, pad=20)
    axes.margins(x=0.18)
    handles = [Patch(color=_COLOURS[kind], label=label) for kind, label in _KINDS.items()]
    _legend(axes, handles)


def _draw_steps(axes: Axes, view: View) -> None:
    for position, name in enumerate(view.names):
        left = 0.0
        for part in PARTS:
            width = 1e3 * stats.median(view.part(name, part))
            axes.barh(position, width, 0.62, left=left, color=_PART_COLOURS[part])
            left += width
        if view.is_split(name):
            exposed = max(0.0, 1e3 * view.exposed(name).value)
            axes.barh(
                position,
                exposed,
                0.62,
                left=left,
                color=PALETTE["vermilion"],
                hatch="///",
                edgecolor="white",
                linewidth=0,
            )
    axes.set_yticks(range(len(view.names)), view.names, fontsize=8)
    axes.set_xlabel("milliseconds per step")
    axes.set_title("where a step goes", fontsize=9, pad=20)
    handles = [Patch(color=colour, label=part) for part, colour in _PART_COLOURS.items()]
    handles.append(Patch(facecolor=PALETTE["vermilion"], hatch="///", edgecolor="white", label=_EXPOSED))
    _legend(axes, handles)


def _legend(axes: Axes, handles: list[Patch]) -> None:
    """Put the legend in one line above the bars."""
    axes.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=len(handles),
        fontsize=7,
        frameon=False,
        handlelength=1.2,
        borderaxespad=0.3,
        columnspacing=1.0,
    )
