"""`make lab`: what it runs on how many cores, and that one case that fails does not take the others with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import case_all_reduce, case_contention, case_sharded, case_threads, lab
from lockstep.bench.ranks import RankFailed
from lockstep.bench.results import Environment, Result, Series


@pytest.mark.parametrize(
    ("cores", "layouts"),
    [
        (1, [(2, 1), (2, 2)]),
        (2, [(2, 1), (2, 2)]),
        (8, [(2, 1), (4, 1), (8, 1), (2, 4)]),
        (16, [(2, 1), (4, 1), (8, 1), (2, 8)]),
    ],
)
def test_layouts_fit_the_cores(cores: int, layouts: list[tuple[int, int]]) -> None:
    parts = {part.case: part for part in lab.parts_for(cores)}
    assert list(parts["threads"].plan(1.0).layouts) == layouts
    assert parts["threads"].settings == 3 * len(layouts)
    assert list(parts["all_reduce"].plan(1.0).world_sizes) == [ranks for ranks, threads in layouts if threads == 1]
    assert [case[0] for case in parts["sharded"].plan(1.0).cases] == list(parts["all_reduce"].plan(1.0).world_sizes)
    assert parts["contention"].plan(1.0).work_rounds


def test_everything_has_time_within_the_default_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) >= 4
    assert all(float(line.split(" s, ")[1].split()[0]) > 1 for line in listed if not line.startswith("gpu"))


def test_failed_and_unmeasured_cases_are_said_and_the_others_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(plan: case_threads.Plan) -> Result:
        parameters: dict[str, int | str] = {"model": "mlp_10m", "world_size": 2, "threads": 2}
        names = ("bound", "lockstep_ddp", "torch_ddp_lockstep", "torch_ddp_gloo")
        series = [Series(parameters, name, 1, [0.1, 0.1]) for name in names]
        return Result("threads", False, Environment.read(), {}, series)

    def failing(plan: Any) -> Result:
        raise RankFailed("rank 1 exited with 1")

    def shared(plan: case_sharded.Plan) -> Result:
        parameters: dict[str, int | str] = {"model": "mlp_10m", "world_size": 8, "optimizer": "adam"}
        names = ("bound", "lockstep_ddp", "sharded", "torch_ddp_gloo", "torch_zero_gloo", "fsdp2_gloo")
        memory = {"8 ranks, mlp_50m": {"torch_ddp_gloo": 8e9, "sharded": 3e9}}
        series = [Series(parameters, name, 1, [0.1, 0.1]) for name in names]
        return Result("sharded", False, Environment.read(), {"resident_bytes": memory}, series)

    monkeypatch.setattr(case_threads, "run", measured)
    monkeypatch.setattr(case_sharded, "run", shared)
    monkeypatch.setattr(case_all_reduce, "run", failing)
    monkeypatch.setattr(case_contention, "run", failing)
    assert lab.main(["--output", str(tmp_path), "--only", "all_reduce", "threads", "sharded"]) == 1
    stored = ["sharded.json", "sharded.md", "threads.json", "threads.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == stored
    page = (tmp_path / "sharded.md").read_text()
    assert "8 ranks, mlp_50m: at most 0.45x of torch DDP's memory | 0.38x | yes" in page
    assert "NOT MEASURED: all_reduce: rank 1 exited with 1" in capsys.readouterr().err
    assert lab.main(["--output", str(tmp_path), "--only", "contention", "--budget", "5"]) == 1
    assert "NOT MEASURED: contention: no time was left" in capsys.readouterr().err
