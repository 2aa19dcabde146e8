"""A pytest plugin that knows what each test took before. It says how long a run will take, and can make one short.

On a terminal a bar stands in the last line; elsewhere a plain line comes now and then. Failures are named at once. It
takes the place of pytest's dots; with `-v` or `-s` it keeps silent and pytest's own progress is there.

`--minutes 7`, which is `make test`, leaves out the longest tests until the others fit. Those marked `core` stay: a
short run, too, sees every part of the package at work.

`--at-most 60` is for a run that will be cut: where the machine turns out to be too slow for all, the longest of the
tests that are left are skipped until the others fit, those marked `core` last of all.

With pytest-xdist (`-n 2 --dist loadfile --no-loadscope-reorder`) several processes take one file after another, those
that take long first, so that none of them is begun when the others are through.

What tests took is in durations.json beside this file, written by `make test-all ARGS=--store-durations`, two at a time,
on a machine with nothing else to do; with fewer tests, it replaces what is stored of their files. It need not be exact:
what the tests of this run have taken, over what they took then, is the pace of this machine; the rest is expected to
keep it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

STORED = Path(__file__).with_name("durations.json")
# Tests below this are not stored, so that the file stays small; and what they take on average.
STORED_FROM_S = 0.5
OTHERS_S = 0.03
# How much of the pace is taken on trust: that of so many seconds is 1, before anything is measured.
TRUSTED_S = 10.0
PLAIN_LINE_EVERY_S = 30.0
REDRAW_EVERY_S = 0.1
BAR_WIDTH = 30


@dataclass
class Forecast:
    """How long a run will take.

    Attributes:
        stored: seconds by the id of a test, of those that take long.
        num_at_once: how many tests run at the same time; all times are then what each adds to that of the whole run.
    """

    stored: Mapping[str, float]
    num_at_once: int = 1
    _left: dict[str, float] = field(default_factory=dict)
    _done_s: float = 0.0

    @classmethod
    def read(cls, path: Path | None = None, num_at_once: int = 1) -> Forecast:
        """From a file that `store` has written; STORED if none is given."""
        path = path or STORED
        return cls(json.loads(path.read_text()) if path.exists() else {}, num_at_once)

    def expected_s(self, name: str) -> float:
        """What a test takes."""
        return self.stored.get(name, OTHERS_S) / self.num_at_once

    def fitting(self, names: Sequence[str], core: Set[str], budget_s: float) -> set[str]:
        """The tests that remain when the longest are left out, but for those of `core`, until all fit."""
        total_s = sum(map(self.expected_s, names))
        kept = set(names)
        # By name, too: several processes must come to the same, and a set has another order in each.
        for name in sorted(kept - core, key=lambda name: (self.expected_s(name), name), reverse=True):
            if total_s <= budget_s:
                break
            kept.remove(name)
            total_s -= self.expected_s(name)
        return kept

    def of_files(self, names: Sequence[str]) -> Counter[str]:
        """What the tests of each file take together."""
        files_s: Counter[str] = Counter()
        for name in names:
            files_s[file_of(name)] += self.expected_s(name)
        return files_s

    def begin(self, names: Sequence[str]) -> None:
        """These tests will run."""
        self._left = {name: self.expected_s(name) for name in names}
        self._done_s = 0.0

    def finish(self, name: str) -> None:
        """This test is over."""
        self._done_s += self._left.pop(name, 0.0)

    def skip(self, name: str) -> None:
        """This test will not run: it tells nothing of the pace."""
        self._left.pop(name, None)

    def pace(self, elapsed_s: float) -> float:
        """What takes a second in the store takes so many here, when the tests that are over have taken so long."""
        return (elapsed_s + TRUSTED_S) / (self._done_s + TRUSTED_S)

    def left_s(self, elapsed_s: float) -> float:
        """Seconds until the end, when the tests that are over have taken so long together."""
        return self.pace(elapsed_s) * sum(self._left.values())

    def has_room(self, name: str, core: Set[str], elapsed_s: float, limit_s: float) -> bool:
        """Whether the next test is among those that remain when the longest are skipped until the end is in time."""
        if self.left_s(elapsed_s) <= limit_s - elapsed_s:
            return True
        if name not in self.stored:  # is short: it makes no room, until there is none
            return elapsed_s < limit_s or name in core
        return name in self.fitting(list(self._left), core, (limit_s - elapsed_s) / self.pace(elapsed_s))

    def share_done(self) -> float:
        """How much of the work is done, 0 … 1."""
        whole_s = self._done_s + sum(self._left.values())
        return self._done_s / whole_s if whole_s else 1.0


def store(took_s: Mapping[str, float], path: Path | None = None) -> None:
    """Write what tests took, for `Forecast.read`; what is stored of other files stays."""
    path = path or STORED
    ran = {file_of(name) for name in took_s}
    kept = {name: seconds for name, seconds in Forecast.read(path).stored.items() if file_of(name) not in ran}
    new = {name: round(seconds, 1) for name, seconds in took_s.items() if seconds >= STORED_FROM_S}
    path.write_text(json.dumps(kept | new, indent=0, sort_keys=True) + "\n")


def file_of(name: str) -> str:
    """Where a test stands.

    >>> file_of("tests/unit/test_x.py::TestY::test_z[a::b]")
    'tests/unit/test_x.py'
    """
    return name.partition("::")[0]


def in_words(seconds: float) -> str:
    """A time for people.

    >>> in_words(4.4), in_words(61), in_words(170), in_words(5400)
    ('4 s', '1 min', '3 min', '90 min')
    """
    return f"{seconds:.0f} s" if seconds < 59.5 else f"{seconds / 60:.0f} min"


class TimeLeft:
    """Listens to a run and says how far it is.

    Args:
        config: pytest's.
        forecast: how long tests take.
    """

    def __init__(self, config: pytest.Config, forecast: Forecast) -> None:
        self._config = config
        self._forecast = forecast
        self._terminal: Any = None  # what pytest writes with, which its types do not name
        self._names: list[str] = []
        self._num_left_out = 0
        self._took_s: dict[str, float] = {}
        self._failed: set[str] = set()
        self._num_done = 0
        self._start_s = self._shown_s = 0.0
        self._is_bar_shown = self._is_over = False

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Some will not run."""
        self._num_left_out += len(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What will run is known."""
        left_out = f" ({self._num_left_out} others are left out)" if self._num_left_out else ""
        self._begin([item.nodeid for item in session.items], left_out)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """What will run is known to one of several processes, and all of them have found the same."""
        if not self._names:
            left_out = " (the longest are left out)" if self._config.option.minutes is not None else ""
            self._begin(list(ids), left_out)

    def _begin(self, names: list[str], left_out: str) -> None:
        self._names = names
        self._forecast.begin(names)
        self._terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        self._start_s = self._shown_s = time.monotonic()
        if self._names and not self._config.option.collectonly:
            self._say(f"{len(self._names)} tests, about {in_words(self._forecast.left_s(0.0))}{left_out}")

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self, report: Any) -> Generator[None, Any, Any]:
        """pytest counts results as ever, and writes no letters for them; a failure is named at once."""
        category, letter, word = yield
        if self._is_over:
            return category, letter, word  # pytest asks again for its summary
        if letter and category in ("failed", "error") and isinstance(report, pytest.TestReport):
            self._failed.add(report.nodeid)
            self._say(f"{category.upper()} {report.nodeid}", red=True)
        return category, "", ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._show(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test was set up, has run, or was torn down."""
        self._took_s[report.nodeid] = self._took_s.get(report.nodeid, 0.0) + report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test is over."""
        self._num_done += 1
        self._forecast.finish(nodeid)
        if self._num_done == len(self._names):
            self._erase()
            self._terminal.write_line(f"{self._num_done} tests in {in_words(time.monotonic() - self._start_s)}")

    def pytest_sessionfinish(self) -> None:
        """All that will run has run."""
        self._is_over = True
        self._erase()
        if self._config.option.store_durations and self._took_s:
            store(self._took_s)

    def _show(self, nodeid: str) -> None:
        now_s = time.monotonic()
        is_terminal = self._terminal.isatty
        if now_s - self._shown_s < (REDRAW_EVERY_S if is_terminal else PLAIN_LINE_EVERY_S):
            return
        self._shown_s = now_s
        left = in_words(self._forecast.left_s(now_s - self._start_s))
        failed = f"{len(self._failed)} failed, " if self._failed else ""
        text = f"{self._num_done} of {len(self._names)} tests, {failed}about {left} left"
        if not is_terminal:
            self._terminal.write_line(f"{text}; at {file_of(nodeid)}")
            return
        filled = round(self._forecast.share_done() * BAR_WIDTH)
        line = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {text}  {file_of(nodeid)}"
        width = self._terminal._tw.fullwidth - 1
        self._terminal.rewrite(line[:width].ljust(width), red=bool(self._failed), green=not self._failed)
        self._terminal.flush()
        self._is_bar_shown = True

    def _say(self, text: str, **markup: bool) -> None:
        self._erase()
        self._terminal.write_line(text, **markup)

    def _erase(self) -> None:
        if self._is_bar_shown:
            self._is_bar_shown = False
            self._terminal.rewrite("", erase=True)
            self._terminal.rewrite("")


class CutShort:
    """Skips tests for which a run that will be cut has no time.

    Args:
        forecast: how long tests take.
        limit_s: what the run may take.
    """

    def __init__(self, forecast: Forecast, limit_s: float) -> None:
        self._forecast = forecast
        self._limit_s = limit_s
        self._core: set[str] = set()
        self._to_come: list[str] = []  # the next one last
        self._start_s = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What will run is known."""
        self._core = {item.nodeid for item in session.items if item.get_closest_marker("core")}
        self._to_come = [item.nodeid for item in reversed(session.items)]
        self._forecast.begin(self._to_come)
        self._start_s = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A test is about to be set up; of those that stand before it, others have run what this process has not."""
        while self._to_come[-1] != item.nodeid:
            self._forecast.finish(self._to_come.pop())
        if not self._forecast.has_room(item.nodeid, self._core, time.monotonic() - self._start_s, self._limit_s):
            self._forecast.skip(item.nodeid)
            pytest.skip(f"this machine is too slow for all tests in {in_words(self._limit_s)} (--at-most)")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test is over."""
        self._forecast.finish(nodeid)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    parser.addoption(
        "--minutes",
        type=float,
        metavar="N",
        help="leave out the longest tests, except those marked `core`, until the others fit, on a quiet machine",
    )
    parser.addoption(
        "--at-most",
        type=float,
        metavar="N",
        help="minutes the run may take: on a slow machine, skip the longest tests so that it does not take more",
    )
    parser.addoption(
        "--store-durations",
        action="store_true",
        help="write what each test took to tests/durations.json; run whole files, on a quiet machine",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--minutes` has no time for; where several processes share the files, the longest come first."""
    forecast = Forecast.read(num_at_once=_num_at_once(config))
    if config.option.minutes is not None:
        core = {item.nodeid for item in items if item.get_closest_marker("core")}
        kept = forecast.fitting([item.nodeid for item in items], core, 60 * config.option.minutes)
        left_out = [item for item in items if item.nodeid not in kept]
        if left_out:
            items[:] = [item for item in items if item.nodeid in kept]
            config.hook.pytest_deselected(items=left_out)
    if forecast.num_at_once > 1:
        files_s = forecast.of_files([item.nodeid for item in items])
        items.sort(key=lambda item: files_s[file_of(item.nodeid)], reverse=True)


def pytest_configure(config: pytest.Config) -> None:
    """Where pytest would write dots, say how far the run is."""
    is_worker = hasattr(config, "workerinput")
    forecast = Forecast.read(num_at_once=_num_at_once(config))
    if config.option.at_most is not None:
        config.pluginmanager.register(CutShort(forecast, 60 * config.option.at_most), "cut_short")
    if config.get_verbosity() < 0 and config.option.capture != "no" and not is_worker:
        config.pluginmanager.register(TimeLeft(config, forecast), "time_left_of_run")


def _num_at_once(config: pytest.Config) -> int:
    """How many processes of pytest-xdist run tests, this one included."""
    worker = getattr(config, "workerinput", None)
    return int(worker["workercount"] if worker else getattr(config.option, "numprocesses", None) or 1)
