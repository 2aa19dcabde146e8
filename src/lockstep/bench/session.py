"""A run of `lockstep bench`: its time, its progress on the terminal, and its measurements so far.

A benchmark passes each series to `Session.add` as soon as it is complete. So a run that is stopped by
Ctrl-C, or by a failed rank, still has a result: of the measurements so far, marked as cut short.
"""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from lockstep.bench.results import Environment, Parameters, Result, Series, Skipped

__all__ = ["ProgressLine", "Session", "parse_duration"]

_UNITS_S = (3600.0, 60.0, 1.0)
_BAR_WIDTH = 20
_LINES_APART_S = 10.0  # if stderr is not a terminal


def parse_duration(text: str) -> float:
    """Parse a duration; returns seconds.

    Args:
        text: a number of seconds, or numbers with units, larger units first: `90`, `30s`, `5m`, `1h30m`.

    Raises:
        ValueError: it is malformed, or not above 0; says what to write.

    >>> parse_duration("5m"), parse_duration("1h30m"), parse_duration("2.5"), parse_duration("30 s")
    (300.0, 5400.0, 2.5, 30.0)
    """
    number = r"(\d+(?:\.\d*)?)"
    match = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s?)?", re.sub(r"\s", "", text.lower()))
    seconds = sum(
        float(part) * unit for part, unit in zip(match.groups() if match else (), _UNITS_S, strict=False) if part
    )
    if not seconds > 0:
        raise ValueError(f"{text!r} is not a duration; write 30s, 5m or 1h30m")
    return seconds


class ProgressLine:
    """Shows on stderr what a run is doing and how much time it has used: one line, updated in place on a terminal.

    Args:
        title: text at its start.
        budget_s: time limit of the run.
        stream: stream to write to; stderr by default.
    """

    def __init__(self, title: str, budget_s: float, stream: TextIO | None = None) -> None:
        self._title, self._budget_s = title, budget_s
        self._stream = stream or sys.stderr
        self._started = time.monotonic()
        self._printed_at = float("-inf")
        self._shows = False  # whether the cursor is on the progress line

    def show(self, doing: str) -> None:
        """Show what is being measured. If stderr is not a terminal, only every ten seconds."""
        gone_s = time.monotonic() - self._started
        share = min(1.0, gone_s / self._budget_s)
        line = f"{self._title}: {_clock(gone_s)} of {_clock(self._budget_s)}  {doing}"
        if self._stream.isatty():
            bar = "█" * round(share * _BAR_WIDTH)
            line = f"{bar:░<{_BAR_WIDTH}} {line}"
            self._stream.write("\r" + line[: _columns(self._stream) - 1] + "\x1b[K")
            self._stream.flush()
            self._shows = True
        elif time.monotonic() - self._printed_at >= _LINES_APART_S:
            self._printed_at = time.monotonic()
            print(line, file=self._stream, flush=True)

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self.close()
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Clear the line."""
        if self._shows:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shows = False


@dataclass
class Session:
    """A benchmark's request, and its measurements so far.

    Attributes:
        name: name of the benchmark; its result is `<name>.json`.
        nproc: number of ranks, at least 1.
        budget_s: approximate time limit of the run.
        quick: whether to measure as little as possible.
        folder: folder for results, and for other files of a benchmark, such as data.
        progress: shows what is being measured.
        environment: as read at the start, before the run loads the machine.
        settings: how it was measured; filled in before the first series.
        series: the measurements.
        skipped: contestants that could not be measured, and why.
        failure: why a finished run counts as failed; empty if it does not.
    """

    name: str
    nproc: int
    budget_s: float
    quick: bool
    folder: Path
    progress: ProgressLine
    environment: Environment = field(default_factory=Environment.read)
    settings: dict[str, object] = field(default_factory=dict)
    series: list[Series] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    failure: str = ""
    started: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds left of the budget; may be negative."""
        return self.started + self.budget_s - time.monotonic()

    def add(self, series: Series) -> None:
        """Add a series; replaces one with the same parameters and contestant."""
        for index, one in enumerate(self.series):
            if (one.contestant, one.parameters) == (series.contestant, series.parameters):
                self.series[index] = series
                return
        self.series.append(series)

    def skip(self, contestant: str, reason: str, parameters: Parameters | None = None) -> None:
        """Note that a contestant cannot be measured here."""
        self.skipped.append(Skipped(parameters or {}, contestant, reason))

    def result(self, complete: bool) -> Result:
        """The result of all measurements so far.

        Args:
            complete: whether the run finished.
        """
        settings = {"nproc": self.nproc, "budget_s": self.budget_s, **self.settings}
        return Result(self.name, self.quick, self.environment, settings, self.series, self.skipped, complete)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80
