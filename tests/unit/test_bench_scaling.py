"""`lockstep bench scaling`: rates and tables from a result, and a run of two ranks."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pytest
from warm_launcher import WarmLauncher

from lockstep.bench import scaling
from lockstep.bench.pages import Table, as_markdown
from lockstep.bench.results import Result, Series
from lockstep.bench.session import ProgressLine, Session
from lockstep.errors import InputError
from test_benchmarks import ENVIRONMENT

# Seconds of a step, by contestant, ranks and samples of each rank.
STEPS = {
    ("lockstep", 1, 64): 4.0, ("lockstep", 2, 64): 5.0, ("lockstep", 2, 32): 2.5,
    ("torch DDP on gloo", 1, 64): 4.0, ("torch DDP on gloo", 2, 64): 8.0, ("torch DDP on gloo", 2, 32): 4.0,
    ("no communication", 1, 64): 4.0, ("no communication", 2, 64): 4.0, ("no communication", 2, 32): 2.0,
}  # fmt: skip


def _result(num_series: int | None = None) -> Result:
    series = [
        Series({"world_size": n, "batch": batch}, name, 1, [seconds, 1.01 * seconds, 0.99 * seconds])
        for (name, n, batch), seconds in STEPS.items()
    ]
    settings = {"nproc": 2, "recipe": "digits", "batch": 64}
    return Result("scaling", False, ENVIRONMENT, settings, series[:num_series], complete=num_series is None)


def test_rates_by_hand() -> None:
    found = {(rate.mode, rate.contestant, rate.world_size): rate for rate in scaling.rates(_result())}
    assert len(found) == 2 * 3 * 2
    assert found["weak", "lockstep", 1].efficiency == 1.0
    assert found["weak", "lockstep", 2].samples_per_s == pytest.approx(128 / 5)
    assert found["weak", "lockstep", 2].efficiency == pytest.approx(4 / 5)
    assert found["weak", "torch DDP on gloo", 2].efficiency == pytest.approx(1 / 2)
    assert (found["strong", "lockstep", 2].batch, found["strong", "lockstep", 2].efficiency) == (32, pytest.approx(0.8))
    assert found["strong", "no communication", 2].efficiency == pytest.approx(1.0)
    assert found["weak", "lockstep", 2].spread_s == pytest.approx((4.96, 5.04), abs=0.02)


def test_tables_and_picture() -> None:
    text = as_markdown(scaling.blocks(_result()))
    assert "| 2 | lockstep | 64 | 5.00 s |" in text
    assert "| 2 | torch DDP on gloo | 32 | 4.00 s |" in text
    assert len(scaling.draw(_result()).axes) == 2


def test_a_run_cut_short_shows_what_it_has() -> None:
    begun = _result(1)
    tables = [block for block in scaling.blocks(begun) if isinstance(block, Table)]
    assert [[row[0] for row in table.rows] for table in tables] == [["1"], ["1"]]
    assert scaling.draw(begun).axes
    assert scaling.draw(_result(0)).axes


# ---- options and runs ----------------------------------------------------------------------------


def _session(tmp_path: Path, nproc: int) -> Session:
    return Session(
        "scaling", nproc, 60.0, True, tmp_path, ProgressLine("x", 60, io.StringIO()), environment=ENVIRONMENT
    )


def _options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    scaling.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "about"),
    [(["--recipe", "digit"], "did you mean 'digits'"), (["--batch", "0"], "must be at least 1, got 0")],
)
def test_options_that_mean_nothing(tmp_path: Path, arguments: list[str], about: str) -> None:
    with pytest.raises(InputError, match=about):
        scaling.measure(_options(*arguments), _session(tmp_path, 2))


def test_numbers_of_ranks() -> None:
    assert scaling._world_sizes(1) == [1]
    assert scaling._world_sizes(6) == [1, 2, 4, 6]
    assert scaling._world_sizes(8) == [1, 2, 4, 8]


def test_a_spent_budget_begins_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_measure_ranks", None)  # not to be called
    session = _session(tmp_path, 2)
    session.budget_s = 0.0
    scaling.measure(_options(), session)
    assert [one.contestant for one in session.skipped] == ["1 ranks, pass 1", "2 ranks, pass 1"]
    assert all("--budget" in one.reason for one in session.skipped)


def measure_two_ranks(folder: Path) -> list[Series]:
    session = _session(folder, 2)
    for _ in range(2):  # samples of the second go behind those of the first
        scaling._measure_ranks(session, "digits", [4, 8], 2, 1)
    return session.series


def test_two_ranks(tmp_path: Path, warm: WarmLauncher) -> None:
    series = warm.call(measure_two_ranks, tmp_path, folder=tmp_path)
    found = {(one.contestant, one.parameters["world_size"], one.parameters["batch"]) for one in series}
    assert found == {(name, 2, batch) for name in {name for name, *_ in STEPS} for batch in (4, 8)}
    assert len(series) == len(found)
    assert min(len(one.samples_s) for one in series) >= 4, "not those of both passes"
