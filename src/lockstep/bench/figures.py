"""Shared by all plots of results. Draws off screen, and changes no global state. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lockstep.bench.results import Result

__all__ = ["GRID", "PALETTE", "new_figure", "save", "tidy"]

# Okabe and Ito's palette, which is distinguishable by colour-blind readers.
PALETTE = {
    "blue": "#0072B2",
    "sky": "#56B4E9",
    "green": "#009E73",
    "orange": "#E69F00",
    "vermilion": "#D55E00",
    "purple": "#CC79A7",
    "yellow": "#F0E442",
    "grey": "#888888",
}
GRID = "#E4E4E4"


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure, sized in inches, with room for a title above and a line below."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(rect=(0.0, 0.03, 1.0, 0.96))  # type: ignore[union-attr, call-arg]
    figure.suptitle(title)
    return figure


def tidy(axes: Axes) -> None:
    """Put the grid behind the data, and remove the frame at the top and right."""
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, result: Result, path: Path) -> None:
    """Write a PNG file, with the machine and versions at the bottom."""
    title = figure.get_suptitle() + (" (quick run)" if result.quick else "")
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    figure.text(0.01, 0.005, result.environment.summary(), fontsize=6, color="#777777", ha="left", va="bottom")
    # Without matplotlib's version in the file, the same numbers give the same bytes.
    figure.savefig(path, dpi=150, metadata={"Software": None})
