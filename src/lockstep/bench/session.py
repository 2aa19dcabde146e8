"""One run of `lockstep bench`: its time, its progress on the terminal, and what it has measured so far.

What measures hands each series to `Session.add` as soon as it is complete. So a run that is ended by
Ctrl-C, or by a rank that fails, still leaves a result: with what there was by then, and marked as cut short.
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
_LINES_APART_S = 10.0  # where stderr is no terminal


def parse_duration(text: str) -> float:
    """Seconds of a time as people write it.

    Args:
        text: a number of seconds, or numbers with units, the larger first: `90`, `30s`, `5m`, `1h30m`.

    Raises:
        ValueError: it is none, or not above 0; says what to write.

    >>> parse_duration("5m"), parse_duration("1h30m"), parse_duration("2.5"), parse_duration("30 s")
    (300.0, 5400.0, 2.5, 30.0)
    """
    number = r"(\d+(?:\.\d*)?)"
    match = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s?)?", re.sub(r"\s", "", text.lower()))
    seconds = sum(
        float(part) * unit for part, unit in zip(match.groups() if match else (), _UNITS_S, strict=False) if part
    )
    if not seconds > 0:
        raise ValueError(f"{text!r} is no time to measure for; write 30s, 5m or 1h30m")
    return seconds


class ProgressLine:
    """What a run is doing and how much of its time is gone: one line on stderr, rewritten on a terminal.

    Args:
        title: stands at its start.
        budget_s: the time of the whole run.
        stream: where to write.
    """

    def __init__(self, title: str, budget_s: float, stream: TextIO | None = None) -> None:
        self._title, self._budget_s = title, budget_s
        self._stream = stream or sys.stderr
        self._started = time.monotonic()
        self._printed_at = float("-inf")
        self._shows = False  # the line of the cursor is ours

    def show(self, doing: str) -> None:
        """Say what is being measured. Where stderr is no terminal: only every ten seconds."""
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
        """Print a line that stays."""
        self.close()
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Take the line away."""
        if self._shows:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shows = False


@dataclass
class Session:
    """What a benchmark is asked for, and what it has so far.

    Attributes:
        name: of the benchmark; its result is `<name>.json`.
        nproc: ranks, at least 1.
        budget_s: the run is to end within about this many seconds.
        quick: the run only has to show that it works.
        folder: where results are written; what a benchmark needs besides (data) may lie there, too.
        progress: where to say what is being measured.
        environment: read when the run begins, before it loads the machine itself.
        settings: how it was measured; to be filled in before the first series.
        series: what has been measured.
        skipped: what could not be measured, and why.
        failure: what makes a run that came to its end a failure all the same; empty for nothing.
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
        """Seconds until the budget is spent; negative afterwards."""
        return self.started + self.budget_s - time.monotonic()

    def add(self, series: Series) -> None:
        """Keep a series: in the place of one with the same parameters and contestant, where there is one."""
        for index, one in enumerate(self.series):
            if (one.contestant, one.parameters) == (series.contestant, series.parameters):
                self.series[index] = series
                return
        self.series.append(series)

    def skip(self, contestant: str, reason: str, parameters: Parameters | None = None) -> None:
        """Note what cannot be measured here."""
        self.skipped.append(Skipped(parameters or {}, contestant, reason))

    def result(self, complete: bool) -> Result:
        """All that there is so far.

        Args:
            complete: whether the run came to its own end.
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
