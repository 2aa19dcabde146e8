"""Tables and picture of `lockstep bench scaling`, from a result and nothing else. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.bench.pages import Block, Table, format_seconds, three_digits
from lockstep.bench.results import Result
from lockstep.bench.scaling.model import Curve, Line, Network
from lockstep.bench.scaling.predictions import TARGET, Fits, Rate, Residual, fit, projection, rates, residuals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["blocks", "draw"]

_MODES = {"weak": "weak: each rank has the batch", "strong": "strong: all ranks share the batch"}
_COLOURS = {"weak": "blue", "strong": "vermilion"}


def blocks(result: Result) -> list[Block]:
    """Rates, fits, residuals and the projection, as far as there are samples for them."""
    settings = result.settings
    found: list[Block] = [
        f"Recipe {settings['recipe']}, batch {settings['batch']}, one thread a rank. Times are medians over samples."
    ]
    measured = rates(result)
    rows = [_rate_row(rate, f"{rate.mode}, {rate.world_size} ranks") for rate in measured]
    header = ["one host", "batch a rank", "step", "samples/s", "efficiency"]
    cores = result.environment.cores
    found += ["## Measured on one host", Table(f"This machine has {cores} cores: more ranks share them.", header, rows)]
    fits = fit(result)
    if fits is None:
        return [*found, "Too little was measured for a fit.", *_skipped(result)]
    found += ["## Fitted", _fits_table(result, fits), "## Predicted and measured", *_residual_tables(result, fits)]
    for mode, projected in projection(result, fits).items():
        rows = [_rate_row(rate, f"{rate.world_size}") for rate in projected]
        header = ["hosts", "batch a rank", "step", "samples/s", "efficiency"]
        caption = (
            f"{_MODES[mode]}; {settings['ranks_per_host']} ranks on each, {settings['rate']} links, cores of their own."
        )
        found += [f"## Projected, {mode}", Table(caption, header, rows)]
    return [*found, *_skipped(result)]


def _rate_row(rate: Rate, name: str) -> list[str]:
    step, efficiency = format_seconds(rate.step_s), f"{100 * rate.efficiency:.0f}%"
    return [name, str(rate.batch), step, three_digits(rate.samples_per_s), efficiency]


def _fits_table(result: Result, fits: Fits) -> Table:
    per_host = result.settings["ranks_per_host"]
    lines = [
        (f"host: all_reduce, {per_host} ranks of one host", fits.host, "GB/s"),
        *([("link: message between two hosts", fits.network.link, "GB/s")] if fits.network else []),
        *(_crowded_lines(fits.crowded) if fits.crowded else []),
        (f"engine, {per_host} ranks of one host: beyond computing and all_reduces", Line(fits.engine_s, 0.0), "GB/s"),
        (f"forward, {per_host} ranks at once", fits.computing.forward, "samples/s"),
        (f"backward, {per_host} ranks at once", fits.computing.backward, "samples/s"),
        (f"optimizer, {per_host} ranks at once", fits.computing.optimizer, "samples/s"),
    ]
    rows = []
    for name, line, unit in lines:
        scale = 1e9 if unit == "GB/s" else 1.0
        rate = f"{1 / line.per_unit_s / scale:.4g} {unit}" if line.per_unit_s > 0 else "–"
        rows.append([name, format_seconds(line.fixed_s) if line.fixed_s else "0", rate])
    caption = "Fitted to one-host runs and to messages between two hosts; nothing here has seen the check."
    return Table(caption, ["line", "fixed", "then"], rows)


def _crowded_lines(crowded: Network) -> list[tuple[str, Line | Curve, str]]:
    return [
        ("check: link, the ranks of both hosts at once", crowded.link, "GB/s"),
        ("check: barrier of all", Line(crowded.told_s or 0.0, 0.0), "GB/s"),
        ("check: host, both at once", crowded.host, "GB/s"),
    ]


def _residual_tables(result: Result, fits: Fits) -> list[Block]:
    header = ["what", "predicted", "measured", "10–90 %", "error"]
    found = residuals(result, fits)
    seen, checks = ([one for one in found if one.is_check is kind] for kind in (False, True))
    tables: list[Block] = [
        Table(
            "How well the fits describe what they were fitted to, and a step on one host.",
            header,
            [_residual_row(one) for one in seen],
        )
    ]
    if checks:
        rows = [[*_residual_row(one), "yes" if one.is_met else "**no**"] for one in checks]
        caption = (
            f"The check: {result.settings['hosts']} namespaces of this machine at {result.settings['rate']}. Its hosts "
            f"share {result.environment.cores} cores: messages, sums and computing are those of all ranks at once, and "
            f"the engine takes {fits.crowding:g} times as long."
        )
        tables.append(Table(caption, [*header, f"within {TARGET:.0%}"], rows))
    return tables


def _residual_row(one: Residual) -> list[str]:
    spread = "–".join(format_seconds(value) for value in one.spread_s)
    return [
        one.what,
        format_seconds(one.predicted_s),
        format_seconds(one.measured_s),
        spread,
        f"{100 * one.error:+.1f}%",
    ]


def _skipped(result: Result) -> list[Block]:
    if not result.skipped:
        return []
    return ["## Not measured", "\n".join(f"- {one.contestant}: {one.reason}" for one in result.skipped)]


# ---- the picture ---------------------------------------------------------------------------------


def draw(result: Result) -> Figure:
    """Rates on one host; the check; the projection. Needs matplotlib."""
    from lockstep.bench.figures import new_figure

    figure = new_figure(13.5, 4.4, f"scaling: {result.settings['recipe']}")
    measured, check, projected = figure.subplots(1, 3)
    _draw_rates(measured, rates(result), "ranks", "measured on one host")
    fits = fit(result)
    checks = [one for one in residuals(result, fits) if one.is_check] if fits else []
    _draw_check(check, checks)
    rows = [rate for mode in projection(result, fits).values() for rate in mode] if fits else []
    _draw_rates(projected, rows, "hosts", f"projected, {result.settings['rate']} links")
    return figure


def _draw_rates(axes: Axes, found: list[Rate], unit: str, title: str) -> None:
    from lockstep.bench.figures import GRID, PALETTE, tidy

    axes.set_title(title if found else f"{title}: nothing", fontsize=10)
    sizes = sorted({rate.world_size for rate in found})
    for mode in dict.fromkeys(rate.mode for rate in found):
        own = [rate for rate in found if rate.mode == mode]
        counts, values = [rate.world_size for rate in own], [rate.samples_per_s for rate in own]
        axes.plot(counts, values, "-o", color=PALETTE[_COLOURS[mode]], label=_MODES[mode], markersize=4)
    if found:
        first = min(found, key=lambda rate: rate.world_size)
        ideal = [first.samples_per_s * size / first.world_size for size in sizes]
        axes.plot(sizes, ideal, "--", color=PALETTE["grey"], label="ideal", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.legend(fontsize=8, frameon=False)
    axes.set_xlabel(unit)
    axes.set_ylabel("samples/s")
    axes.grid(color=GRID, linewidth=0.7)
    tidy(axes)


def _draw_check(axes: Axes, checks: list[Residual]) -> None:
    """Predicted over measured, with a band where the target lies."""
    from lockstep.bench.figures import GRID, PALETTE, tidy

    axes.set_title("check: error of the prediction" if checks else "check: nothing", fontsize=10)
    for place, one in enumerate(checks):
        colour = PALETTE["green" if one.is_met else "vermilion"]
        axes.barh(place, 100 * one.error, color=colour, height=0.6)
    axes.axvspan(-100 * TARGET, 100 * TARGET, color=PALETTE["grey"], alpha=0.15)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(checks)), [one.what.partition(",")[0] for one in checks], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("%, positive: predicted slower than measured")
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    tidy(axes)
