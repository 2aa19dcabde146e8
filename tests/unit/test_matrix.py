"""What the test matrix reads and writes, without an environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lockstep.comm import torch_version
from tests.matrix import environments, groups, run, table
from tests.matrix.groups import Counts

ROOT = Path(__file__).parents[2]


def test_every_group_stands_for_tests_that_exist() -> None:
    assert [group.name for group in groups.ALL] == [group.name for group in groups.SHORT]
    for group in (*groups.ALL, *groups.SHORT):
        for argument in group.arguments:
            assert not argument.startswith("tests/") or (ROOT / argument).exists(), argument


def test_matrix_and_package_know_the_same_releases() -> None:
    names = [tuple(map(int, release.name.split("."))) for release in environments.RELEASES]
    assert (names[0], names[-1]) == (torch_version.OLDEST, torch_version.NEWEST_TESTED)
    assert names == sorted(names)
    for release in environments.RELEASES:
        assert release.torch.startswith(f"{release.name}.")


def test_constraints_of_another_release() -> None:
    pinned = (ROOT / "constraints.txt").read_text()
    found = environments.constraints_for(pinned, "2.99.1").splitlines()
    assert [line for line in found if line.startswith("torch==")] == ["torch==2.99.1"]
    assert not any(line.startswith("sympy") for line in found), "what comes with torch differs by release"
    assert next(line for line in pinned.splitlines() if line.startswith("pytest==")) in found


def test_rows_of_other_releases_stay(tmp_path: Path) -> None:
    page = tmp_path / "versions.md"
    table.update(page, table.Row("2.15", "2.15.0", "3.11.7", {"DDP": Counts(7, 1, 2)}, "all", "2030-01-02"))
    table.update(page, table.Row("2.6", "2.6.0", "3.10", {}, "not run: no | here", "2030-01-03"))
    table.update(page, table.Row("2.15", "2.15.0", "3.11.7", {"DDP": Counts(8, 0, 2)}, "all", "2030-01-04"))
    table.update(page, table.Row("2.15", "2.15.0", "3.11.7", {"launch": Counts(5, 0, 0)}, "all", "2030-01-05"))
    rows = [line for line in page.read_text().splitlines() if line.startswith("| 2.")]
    assert [row.split(" | ")[0] for row in rows] == ["| 2.6", "| 2.15"]
    assert "not run: no / here" in rows[0]
    assert "8/0/2" in rows[1]
    assert "5/0/0" in rows[1]
    assert "2030-01-05" in rows[1]


def test_counts_of_a_report() -> None:
    report = '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>'
    assert groups.read_junit(report) == Counts(3, 3, 3)


def test_release_that_cannot_be_installed_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        says = "3.11\n" if "-c" in command else "ERROR: No space left on device\n"
        return subprocess.CompletedProcess(command, 0 if "-c" in command else 1, says, "")

    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(subprocess, "run", refuse)
    assert run.main(["--ends"]) == 0
    said = capsys.readouterr().out
    for release in (*environments.RELEASES[:1], *environments.RELEASES[-1:]):
        assert f"torch {release.torch}: not run, the installation failed: ERROR: No space left on device" in said
    assert not list(tmp_path.iterdir())
