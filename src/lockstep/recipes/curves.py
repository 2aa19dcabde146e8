"""`curves.png`: loss and accuracy of a run, plotted from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# The object interface: `pyplot` would choose a display and keep figures alive.
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

Record = Mapping[str, Any]

__all__ = ["draw_curves"]

# Distinguishable in print and by colour-blind readers (Okabe and Ito, "Color Universal Design").
_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#9A9A9A"


def draw_curves(records: Iterable[Record], path: Path, title: str) -> None:
    """Plot training loss, held-out loss and held-out accuracy over epochs. Local.

    Args:
        records: records of a metrics.jsonl, with at least one epoch.
        path: path of the PNG to write.
        title: title of the plot.
    """
    steps, epochs = _steps_and_epochs(records)
    figure = Figure(figsize=(10, 4), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    left, right = figure.subplots(1, 2)
    _draw_loss(left, steps, epochs)
    _draw_accuracy(right, epochs)
    for axes in (left, right):
        axes.set(xlabel="epoch", xlim=(0, 1.02 * epochs[-1]["epoch"]))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.grid(color="#E6E6E6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw_loss(axes: Axes, steps: Sequence[Record], epochs: Sequence[Record]) -> None:
    ends = [record["epoch"] for record in epochs]
    places = _in_epochs(steps, epochs)
    columns = _column(steps, "loss"), _column(epochs, "loss"), _column(epochs, "held_out_loss")
    of_steps, of_epochs, held_out = columns
    axes.plot(places, of_steps, color=_BLUE, alpha=0.3, linewidth=0.8, label="one step")
    middles = [end - 0.5 for end in ends]  # the mean of an epoch is plotted at its middle
    axes.plot(middles, of_epochs, color=_BLUE, linewidth=2, label="training, mean of an epoch")
    axes.plot(ends, held_out, color=_ORANGE, linewidth=2, marker="o", ms=4, label="held out")
    axes.set(ylabel="cross-entropy loss", title="Loss")
    if any(
        value > 0 for column in columns for value in column
    ):  # otherwise every image was broken, or the run diverged
        axes.set(yscale="log", ylabel="cross-entropy loss (log scale)")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False)


def _draw_accuracy(axes: Axes, epochs: Sequence[Record]) -> None:
    last = epochs[-1]
    values = _column(epochs, "held_out_accuracy")
    ends = [record["epoch"] for record in epochs]
    axes.plot(ends, values, color=_ORANGE, linewidth=2, marker="o", ms=4, label="top-1")
    if "held_out_top5" in last:
        axes.plot(ends, _column(epochs, "held_out_top5"), color=_BLUE, linewidth=2, marker="o", ms=4, label="top-5")
        axes.legend(frameon=False, loc="lower left")
    axes.axhline(last["held_out_accuracy"], color=_GREY, linewidth=0.8, linestyle=":")
    result = f"{last['held_out_accuracy']:.2%}: {last['held_out_correct']:.0f} of {last['held_out_images']:.0f} images"
    axes.text(0.98, 0.05, result, transform=axes.transAxes, ha="right", color=_ORANGE, fontweight="bold")
    axes.set(ylabel="accuracy", title="Accuracy on held-out images", ylim=(min(*values, 0.95) - 0.01, 1.005))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))


def _steps_and_epochs(records: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    kinds: dict[str, list[Record]] = {"step": [], "epoch": []}
    for record in records:
        if record["kind"] in kinds:
            kinds[record["kind"]].append(record)
    return kinds["step"], kinds["epoch"]


def _in_epochs(steps: Sequence[Record], epochs: Sequence[Record]) -> list[float]:
    """The end of each step, in epochs."""
    last_step = {0: 0, **{record["epoch"]: record["step"] for record in epochs}}
    if steps:  # a run may start with a later epoch
        last_step.setdefault(steps[0]["epoch"] - 1, steps[0]["step"] - 1)
    ends = []
    for record in steps:
        begin, end = last_step[record["epoch"] - 1], last_step[record["epoch"]]
        ends.append(record["epoch"] - 1 + (record["step"] - begin) / (end - begin))
    return ends


def _column(records: Sequence[Record], name: str) -> list[float]:
    """One value per record; nan, which is a gap in the curve, if it was not a number."""
    return [float("nan") if record[name] is None else record[name] for record in records]
