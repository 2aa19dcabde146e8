"""How far a run of tests is, and how long it will take."""

from __future__ import annotations

import contextlib
import doctest
import json
import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import time_left
from time_left import OTHERS_S, CutShort, Forecast, file_of, store

from lockstep.testing import limit_s

ROOT = Path(__file__).parents[2]
SUITE = """
import pytest

@pytest.mark.parametrize("number", range(5))
def test_one(number):
    print("heard by nobody")
    assert number != 3

@pytest.fixture
def broken():
    raise ValueError

def test_broken(broken):
    pass

@pytest.mark.skip
def test_skipped():
    pass

@pytest.mark.xfail
def test_expected_to_fail():
    assert False
"""


def test_docstrings() -> None:
    assert doctest.testmod(time_left).failed == 0


def test_forecast_takes_the_pace_of_what_is_done() -> None:
    """Four stored seconds that took eight: the rest is expected to take twice as long, once the pace is believed."""
    forecast = Forecast({"long": 400.0, "short": 4.0})
    forecast.begin(["long", "short", "new"])
    assert forecast.left_s(0.0) == 404.0 + OTHERS_S
    assert forecast.share_done() == 0.0
    forecast.finish("long")
    assert forecast.left_s(800.0) == pytest.approx((4.0 + OTHERS_S) * 2, rel=0.02)
    assert forecast.share_done() == pytest.approx(400 / (404 + OTHERS_S))
    forecast.finish("short")
    forecast.finish("new")
    assert forecast.left_s(810.0) == 0.0
    assert forecast.share_done() == 1.0


def test_one_quick_test_does_not_make_a_pace() -> None:
    """A first test that took thirty times as long, because it imports torch, tells little of the rest."""
    forecast = Forecast({})
    forecast.begin([str(number) for number in range(1000)])
    forecast.finish("0")
    assert forecast.left_s(1.0) < 1.2 * 999 * OTHERS_S


def test_the_longest_are_left_out_until_the_others_fit() -> None:
    forecast = Forecast({"a": 60.0, "b": 30.0, "c": 20.0, "d": 10.0})
    names = ["d", "c", "b", "a"]
    assert forecast.fitting(names, set(), 120.0) == {"a", "b", "c", "d"}
    assert forecast.fitting(names, set(), 119.0) == {"b", "c", "d"}
    assert forecast.fitting(names, set(), 59.0) == {"c", "d"}
    assert forecast.fitting(names, {"a"}, 71.0) == {"a", "d"}
    assert forecast.fitting(names, {"a"}, 5.0) == {"a"}


def test_every_process_leaves_the_same_tests_out() -> None:
    """Of those that take as long, the last by name: the order of a set differs from process to process."""
    names = [f"test_{number}" for number in range(10, 60)]
    kept = Forecast(dict.fromkeys(names, 1.0)).fitting(names, set(), 20.0)
    assert kept == set(names[:20])


def test_a_run_that_will_be_cut_skips_the_longest_that_are_left() -> None:
    forecast = Forecast({"first": 100.0, "a": 60.0, "b": 30.0, "c": 20.0})
    forecast.begin(["first", "a", "b", "c", "short"])
    assert all(forecast.has_room(name, set(), 0.0, 230.0) for name in ("first", "a", "b", "c", "short"))
    forecast.finish("first")  # took twice as long: with the 10 s that are trusted, 220 s here for 110
    elapsed_s = 210.0

    def fitting(limit_s: float, *core: str) -> list[str]:
        return [name for name in ("a", "b", "c", "short") if forecast.has_room(name, set(core), elapsed_s, limit_s)]

    assert fitting(elapsed_s + 2.0 * 111) == ["a", "b", "c", "short"]
    assert fitting(elapsed_s + 2.0 * 109) == ["b", "c", "short"]
    assert fitting(elapsed_s + 2.0 * 49, "c") == ["c", "short"]
    assert fitting(elapsed_s + 2.0 * 90, "a") == ["a", "c", "short"]
    assert fitting(elapsed_s - 1.0, "a") == ["a"], "there is no time at all, and what is core runs all the same"
    forecast.skip("a")
    assert fitting(elapsed_s + 2.0 * 51) == ["a", "b", "c", "short"]
    assert forecast.left_s(elapsed_s) == pytest.approx(2.0 * 50, rel=0.02), "what is skipped tells nothing of the pace"


def test_what_several_processes_take_at_once_takes_as_much_less() -> None:
    forecast = Forecast({"x.py::a": 60.0, "x.py::b": 30.0, "y.py::c": 20.0}, num_at_once=2)
    names = ["x.py::a", "x.py::b", "y.py::c"]
    assert forecast.of_files(names) == {"x.py": 45.0, "y.py": 10.0}
    assert forecast.fitting(names, set(), 26.0) == {"x.py::b", "y.py::c"}
    forecast.begin(names)
    forecast.finish("x.py::a")  # in 70 s: with the 10 s that are trusted, twice what is stored
    assert forecast.left_s(70.0) == 2 * 25.0


def test_a_process_takes_for_done_what_stands_before_its_tests() -> None:
    """Another one runs it. Here 100 s of 101 have passed, for 60 s of two processes: no time is left."""
    items = [SimpleNamespace(nodeid=name, get_closest_marker=lambda mark: None) for name in ("a", "b", "c", "d")]
    cut = CutShort(Forecast({"a": 80.0, "b": 40.0, "c": 0.2, "d": 9.0}, num_at_once=2), limit_s=101.0)
    cut.pytest_collection_finish(SimpleNamespace(items=items))
    cut._start_s -= 100.0
    cut.pytest_runtest_setup(items[2])
    with pytest.raises(pytest.skip.Exception, match="this machine is too slow"):
        cut.pytest_runtest_setup(items[3])


def test_stored_durations_are_read_again(tmp_path: Path) -> None:
    """Those of the files that ran anew; those of others stay."""
    path = tmp_path / "durations.json"
    store({"x.py::a": 2.04, "x.py::b": 0.1, "x.py::c": 7.0, "y.py::d": 100.0}, path)
    assert Forecast.read(path).stored == {"x.py::a": 2.0, "x.py::c": 7.0, "y.py::d": 100.0}
    store({"x.py::a": 3.0}, path)
    assert Forecast.read(path).stored == {"x.py::a": 3.0, "y.py::d": 100.0}
    assert Forecast.read(tmp_path / "missing").stored == {}


def test_stored_durations_are_those_of_tests_that_there_are() -> None:
    """Else they tell nothing of a run. `make test-all ARGS=--store-durations` writes them anew."""
    missing = {name for name in map(file_of, Forecast.read().stored) if not (ROOT / name).exists()}
    assert not missing


def pytest_command(folder: Path, *arguments: str) -> list[str]:
    (folder / "test_suite.py").write_text(textwrap.dedent(SUITE))
    options = ("-q", "-c", "/dev/null", "-p", "time_left", "-p", "no:cacheprovider", "--rootdir", str(folder))
    return [sys.executable, "-m", "pytest", *options, *arguments, str(folder)]


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = pytest_command(folder, *arguments)
    # From there: pytest prints paths from the folder that it is started in.
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=limit_s(60))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(time_left.__file__).parent), "TERM": "xterm", "COLUMNS": "100"}


IN_TWO_PROCESSES = ("--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder")


@pytest.mark.parametrize("options", [(), IN_TWO_PROCESSES], ids=["one process", "two"])
def test_plain_lines_where_nothing_moves(options: tuple[str, ...], tmp_path: Path) -> None:
    """Failures at once, a line at the end, then pytest's own summary; no dots."""
    done = run_pytest(tmp_path, *options)
    assert done.returncode == 1
    before, _, after = done.stdout.partition("= ERRORS =")
    lines = [line for line in before.splitlines() if line and line != "bringing up nodes..."]
    assert re.fullmatch(r"8 tests, about \d+ s", lines[0])
    assert lines[1] == "FAILED test_suite.py::test_one[3]"
    assert lines[2] == "ERROR test_suite.py::test_broken"
    assert re.fullmatch(r"8 tests in \d+ s", lines[3])
    assert re.search(r"^FAILED \S*test_suite.py::test_one\[3\]", after, re.MULTILINE), "pytest's summary has its words"
    assert "1 failed, 4 passed, 1 skipped, 1 xfailed, 1 error in " in after.splitlines()[-1]


@pytest.mark.parametrize("option", ["-v", "-s"])
def test_pytests_own_progress_where_more_is_to_be_seen(option: str, tmp_path: Path) -> None:
    done = run_pytest(tmp_path, option)
    assert "8 tests" not in done.stdout
    assert "test_suite.py ...F.Esx" in done.stdout or option == "-s"


def test_bar_on_a_terminal(tmp_path: Path) -> None:
    """It grows, and nothing of it is left."""
    slow = tmp_path / "conftest.py"
    slow.write_text("import time_left\ntime_left.REDRAW_EVERY_S = 0.0\n")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(pytest_command(tmp_path), env=environment(), stdout=theirs, stdin=theirs)
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # which is the end, of a terminal
        while part := os.read(ours, 4096):
            written += part
    os.close(ours)
    assert process.wait(limit_s(10)) == 1
    text = re.sub(r"\x1b\[[\d;]*m", "", written.decode())
    shown = re.findall(r"\[(#*)(\.*)\] (\d+) of 8 tests, (1 failed, |2 failed, )?about \d+ s left", text)
    assert [int(number) for _, _, number, _ in shown] == list(range(8))
    lengths = [len(filled) for filled, _, _, _ in shown]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] > 20
    assert re.search(r"\r +\r8 tests in \d+ s\r\n", text), "the bar is erased"


@pytest.mark.parametrize("options", [(), IN_TWO_PROCESSES], ids=["one process", "two"])
def test_a_run_without_time(options: tuple[str, ...], tmp_path: Path) -> None:
    """All is skipped, with the reason; nothing hangs on what a fixture would have done."""
    done = run_pytest(tmp_path, "--at-most=0", "-rs", *options)
    assert done.returncode == 0
    assert re.search(r"^SKIPPED \[8\] .*: this machine is too slow for all tests in 0 s", done.stdout, re.MULTILINE)
    assert "8 skipped in " in done.stdout.splitlines()[-1]


def test_a_short_run(tmp_path: Path) -> None:
    """With a store of its own, which a first run writes: the long test is left out, and says so."""
    own = f"import pathlib, time_left\ntime_left.STORED = pathlib.Path({str(tmp_path / 'd.json')!r})\n"
    (tmp_path / "conftest.py").write_text(own + "time_left.STORED_FROM_S = 0.0\n")
    run_pytest(tmp_path, "--store-durations")
    stored = json.loads((tmp_path / "d.json").read_text())
    assert len(stored) == 8
    (tmp_path / "d.json").write_text(json.dumps(stored | {"test_suite.py::test_one[3]": 500.0}))
    done = run_pytest(tmp_path, "--minutes=8", "--no-summary")
    assert re.match(r"7 tests, about \d+ s \(1 others are left out\)\n", done.stdout)
    assert "FAILED" not in done.stdout
    done = run_pytest(tmp_path, "--minutes=4", "--no-summary", *IN_TWO_PROCESSES)
    assert re.search(r"^7 tests, about \d+ s \(the longest are left out\)\n", done.stdout, re.MULTILINE)
    assert "FAILED" not in done.stdout
    done = run_pytest(tmp_path, "--minutes=5", "--no-summary", *IN_TWO_PROCESSES)
    assert re.search(r"^8 tests, about 4 min \(the longest are left out\)\n", done.stdout, re.MULTILINE), (
        "of two at once"
    )
