"""Limits of tests follow the machine."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.testing import limit_s, limits

pytestmark = pytest.mark.usefixtures("no_garbage")

TESTS = Path(__file__).parents[1]
# Calls that wait for something, by the name of what is called; those of programs in strings are not seen.
WAITING = {"run", "communicate", "wait", "join", "result", "get"}


def fixed_limits(tree: ast.Module) -> Iterator[int]:
    """Lines of calls that wait, with a number of seconds for a limit."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITING:
            for keyword in node.keywords:
                if keyword.arg == "timeout" and isinstance(keyword.value, ast.Constant) and keyword.value.value:
                    yield keyword.value.lineno


def test_limits_are_asked_for() -> None:
    """A number of seconds breaks on a busy machine: write `timeout=limit_s(30)`."""
    paths = [
        path for path in TESTS.rglob("*.py") if path.parent.name not in ("matrix", "torch_suite", "programs", "gpu")
    ]
    found = {str(path): list(fixed_limits(ast.parse(path.read_text()))) for path in paths}
    assert not {path: lines for path, lines in found.items() if lines}
    assert list(fixed_limits(ast.parse("process.communicate(timeout=30)"))) == [1]
    assert list(fixed_limits(ast.parse("process.communicate(timeout=limit_s(30))"))) == []


@pytest.mark.timeout(150)
def test_pytests_own_limit_follows_the_machine(request: pytest.FixtureRequest) -> None:
    """It is asked for when the test begins, and stands before the test's own mark."""
    now, quiet = (mark.args[0] for mark in request.node.iter_markers("timeout"))
    assert quiet == 150
    assert isinstance(now, float)
    assert now >= 150


@pytest.mark.parametrize(
    ("loadavg", "wanting"),
    [
        ("0.00 0.00 0.00 1/80 4711", 0.0),
        ("7.50 3.00 1.00 2/80 4711", 7.5),
        ("1.00 3.00 1.00 12/80 4711", 12.0),
    ],
)
def test_crowding_is_the_load_of_each_core(loadavg: str, wanting: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last minute, or of this moment if that is more; and an idle machine shortens nothing."""
    for cores in (1, 2, 4):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert limits._crowding(loadavg) == max(1.0, wanting / cores)


def test_slow_machines_have_longer_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest run counts: that others were interrupted is no property of the machine."""
    quiet_s = limits._QUIET_RUN_S
    monkeypatch.setattr(limits, "_crowding", lambda: 2.0)
    for times_slower, expected in ((0.5, 20.0), (1.0, 20.0), (3.0, 60.0)):
        runs = iter([20e-3, times_slower * quiet_s] + [9e-3] * limits._NUM_RUNS)
        monkeypatch.setattr(limits, "_run_s", lambda runs=runs: next(runs))
        limits._slowness.cache_clear()
        assert limit_s(10) == pytest.approx(expected)
    limits._slowness.cache_clear()


def test_a_machine_is_measured_in_milliseconds() -> None:
    """The piece of work is of about the size that the module takes for usual: were it nothing, no machine were slow."""
    assert limits._run_s() > 0.02 * limits._QUIET_RUN_S
    assert limit_s(1.0) >= 1.0
