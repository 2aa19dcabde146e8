"""The tables and the plot of `lockstep bench comm`, from a result alone. Does not import torch.

[Note: sizes and bandwidths] As in nccl-tests: *size* is the larger of a rank's two buffers in bytes, *count* the number
of elements: of the whole buffer if it is the same on all ranks, of one rank's part if
parts are gathered, scattered or exchanged. With n ranks and t seconds per call, and 10^9 bytes per GB::

    algbw = size / t
    busbw = algbw * factor     2 (n - 1) / n   all_reduce
                               (n - 1) / n     all_gather, gather, scatter, reduce_scatter, all_to_all
                               1               broadcast, reduce, send_recv

busbw is what each link of a ring would carry, so it can be compared with the hardware for any n. `send_recv` is a
ping-pong between ranks 0 and 1, and its time is half a round trip, as in MPI's benchmarks. A barrier has no bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.bench import stats
from lockstep.bench.pages import Block, Table, format_bytes, format_seconds, three_digits
from lockstep.bench.results import Result, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["algorithm_bandwidth", "blocks", "bus_bandwidth", "bus_factor", "draw", "wrong_elements"]

_GB = 1e9
_HEADER = ("backend", "size B", "count", "type", "redop", "time µs", "10–90 %", "algbw GB/s", "busbw GB/s", "#wrong")
_BY_PARTS = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
_STYLES = {
    "lockstep": ("blue", "o"),
    "gloo": ("vermilion", "s"),
    "mpi": ("green", "D"),
    "nccl": ("orange", "v"),
    "Intel MPI": ("purple", "x"),
    "Open MPI": ("sky", "+"),
    "MPICH": ("grey", "1"),
}
_COLUMNS = 4


def bus_factor(verb: str, world_size: int) -> float:
    """Factor from algorithm bandwidth to bus bandwidth. See [Note: sizes and bandwidths].

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather_into_tensor", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if verb == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if verb.startswith(_BY_PARTS):
        return (world_size - 1) / world_size
    return 1.0


def algorithm_bandwidth(size_bytes: int, seconds: float) -> float:
    """Algorithm bandwidth in GB/s, with 10^9 bytes per GB.

    >>> algorithm_bandwidth(1_000_000, 0.001)
    1.0
    """
    return size_bytes / seconds / _GB


def bus_bandwidth(verb: str, size_bytes: int, seconds: float, world_size: int) -> float:
    """Bus bandwidth in GB/s: over each link of a ring.

    >>> bus_bandwidth("all_reduce", 1_000_000, 0.001, 4)
    1.5
    """
    return algorithm_bandwidth(size_bytes, seconds) * bus_factor(verb, world_size)


def blocks(result: Result) -> list[Block]:
    """A table per verb, how to read it, and what was skipped."""
    n = int(result.settings["nproc"])  # type: ignore[call-overload]
    cores = result.environment.cores
    found: list[Block] = [
        f"{n} ranks{f' on {cores} cores' if n > cores else ''}, one thread each. Times are medians over samples; a "
        "sample is the mean of many calls, on the rank that was slowest."
    ]
    for verb in result.values("verb"):
        of_verb = [one for one in result.series if one.parameters["verb"] == verb]
        of_verb.sort(key=_order)
        found += [f"## {verb}", Table("", _HEADER, [_row(one) for one in of_verb])]
    if lines := _skipped(result):
        found.append("## Not measured")
        found.append("\n".join(f"- {line}" for line in lines))
    return found


def wrong_elements(series: Series) -> int | None:
    """Number of wrong elements in the results; None if not checked."""
    found = series.facts.get("wrong")
    return None if found is None else int(float(str(found)))


def _order(series: Series) -> tuple[str, str, int]:
    """Sort key; backends stay in the order in which they were measured."""
    return (str(series.parameters["dtype"]), str(series.parameters["op"]), int(series.parameters["bytes"]))


def _row(series: Series) -> list[str]:
    parameters, seconds = series.parameters, stats.median(series.samples_s)
    verb, size, n = str(parameters["verb"]), int(parameters["bytes"]), int(parameters["world_size"])
    low, high = stats.percentiles(series.samples_s)
    bandwidths = [algorithm_bandwidth(size, seconds), bus_bandwidth(verb, size, seconds, n)]
    wrong = wrong_elements(series)
    return [
        series.contestant,
        str(size),
        str(parameters["count"]),
        str(parameters["dtype"]),
        str(parameters["op"]),
        three_digits(seconds * 1e6),
        f"{three_digits(low * 1e6)}–{three_digits(high * 1e6)}",
        *(f"{value:.3f}" for value in bandwidths),
        "N/A" if wrong is None else f"{wrong}" if not wrong else f"**{wrong}**",
    ]


def _skipped(result: Result) -> list[str]:
    """A line per contestant and reason, with the verbs concerned."""
    about: dict[tuple[str, str], list[str]] = {}
    for one in result.skipped:
        verbs = about.setdefault((one.contestant, one.reason), [])
        name = " ".join(str(one.parameters[key]) for key in ("verb", "dtype") if key in one.parameters)
        if name and name not in verbs:
            verbs.append(name)
    return [
        f"{contestant}{': ' + ', '.join(verbs) if verbs else ''}: {reason}"
        for (contestant, reason), verbs in about.items()
    ]


# ---- the plot ------------------------------------------------------------------------------------


def draw(result: Result) -> Figure:
    """Plot time and bus bandwidth over size, for each verb. Needs matplotlib."""
    from lockstep.bench.figures import new_figure

    verbs = [str(verb) for verb in result.values("verb") if verb != "barrier"]
    n = int(result.settings["nproc"])  # type: ignore[call-overload]
    columns = min(_COLUMNS, max(1, len(verbs)))
    rows = max(1, -(-len(verbs) // columns))
    figure = new_figure(3.6 * columns + 0.6, 4.6 * rows + 0.9, f"comm: time and bus bandwidth of every verb, {n} ranks")
    grid = figure.subplots(2 * rows, columns, squeeze=False, sharex=True)
    for place in range(rows * columns):
        row, column = divmod(place, columns)
        times, bandwidths = grid[2 * row][column], grid[2 * row + 1][column]
        if place >= len(verbs):
            times.set_axis_off()
            bandwidths.set_axis_off()
            continue
        _plot(times, bandwidths, result, verbs[place])
        if column == 0:
            times.set_ylabel("time per call")
            bandwidths.set_ylabel("bus bandwidth, GB/s")
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(
        list(lines.values()),
        [str(label) for label in lines],
        loc="outside upper right",
        ncols=6,
        frameon=False,
        fontsize=8,
    )
    return figure


def _plot(times: Axes, bandwidths: Axes, result: Result, verb: str) -> None:
    from lockstep.bench.figures import GRID, PALETTE, tidy

    series = [one for one in result.series if one.parameters["verb"] == verb]
    dtype = series[0].parameters["dtype"]
    for name in dict.fromkeys(one.contestant for one in series):
        own = [one for one in series if one.contestant == name and one.parameters["dtype"] == dtype]
        own.sort(key=_order)
        if not own:
            continue
        key = next((key for key in _STYLES if name.startswith(key)), "MPICH")
        colour, marker = PALETTE[_STYLES[key][0]], _STYLES[key][1]
        sizes = [int(one.parameters["bytes"]) for one in own]
        medians = [stats.median(one.samples_s) for one in own]
        lows, highs = zip(*(stats.percentiles(one.samples_s) for one in own), strict=True)
        n = int(own[0].parameters["world_size"])
        busbw = [bus_bandwidth(verb, size, seconds, n) for size, seconds in zip(sizes, medians, strict=True)]
        times.plot(sizes, medians, "-", marker=marker, markersize=4, color=colour, label=name, linewidth=1.3)
        times.fill_between(sizes, lows, highs, color=colour, alpha=0.15, linewidth=0)
        bandwidths.plot(sizes, busbw, "-", marker=marker, markersize=4, color=colour, label=name, linewidth=1.3)
    times.set_title(verb, fontsize=10)
    for axes in (times, bandwidths):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda size, _: format_bytes(int(size)) if size >= 1 else "")
        axes.tick_params(axis="x", labelrotation=45, labelsize=7)
        axes.grid(color=GRID, linewidth=0.7)
        tidy(axes)
    times.set_yscale("log")
    times.yaxis.set_minor_formatter(lambda *_: "")
    times.yaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds).replace(".00 ", " ").replace(".0 ", " "))
