"""`lockstep doctor`: the report, and the table of verbs that were really run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.launch import cli
from lockstep.tools.capabilities import measure, table
from lockstep.tools.capabilities.measure import Column
from lockstep.tools.capabilities.verbs import CLASSIC, VERBS
from lockstep.tools.doctor import Finding, examine

PAGE = Path(__file__).parents[2] / "docs" / "capabilities.md"


def test_report_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if not line.startswith(" ")][:2] == ["torch", "cores"]
    assert any(line.startswith("ok       shared memory  works") for line in lines)


def test_too_many_threads_come_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    found = {finding.subject: finding for finding in examine()}
    assert "OMP_NUM_THREADS=4096" in found["cores"].text
    assert "divided by the number of ranks" in found["cores"].remedy


def test_what_is_needed_and_missing_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Finding("shared memory", "no space", "make some", is_needed=True)
    monkeypatch.setattr("lockstep.tools.doctor.examine", lambda: iter([missing]))
    assert cli.main(["doctor"]) == 1
    assert "MISSING  shared memory" in capsys.readouterr().out


def test_verbs_that_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "find_columns", lambda: [Column("lockstep", "lockstep", "cpu"), ABSENT])
    assert cli.main(["doctor", "--capabilities", "--format", "json"]) == 0
    ours, absent = json.loads(capsys.readouterr().out)
    assert ours["verbs"] == {verb: {"works": True, "trouble": None} for verb in VERBS}
    assert absent["absent"] == "no GPUs"
    assert absent["verbs"]["send"] == {"works": None, "trouble": None}


ABSENT = Column("lockstep", "lockstep", "cuda", "no GPUs")


def test_backend_that_cannot_be_used_costs_one_start() -> None:
    column = Column("none", "nonesuch", "cpu")
    measure.measure(column, list(CLASSIC))
    assert set(column.troubles) == set(CLASSIC)
    assert all("a rank ended with code 1" in trouble for trouble in column.troubles.values())


def test_verb_that_ends_its_ranks_costs_itself(tmp_path: Path) -> None:
    for rank, last in enumerate(('{"verb": "b", "state": "begun"}', '{"verb": "b", "state": "done", "trouble": ""}')):
        done = '{"verb": "a", "state": "begun"}\n{"verb": "a", "state": "done", "trouble": "odd"}\n'
        (tmp_path / f"rank{rank}.jsonl").write_text(done + last + "\n")
    assert measure._read(tmp_path) == {"a": ["odd", "odd"], "b": [None, ""]}


def test_forms() -> None:
    column = Column("gloo", "gloo", "cpu", troubles={"send": "", "recv": "RuntimeError: no"})
    text = table.as_text([column, ABSENT], ["send", "recv"])
    assert text.splitlines()[2:4] == ["send     ✓         ?", "recv     ✘         ?"]
    assert "gloo, CPU, recv: RuntimeError: no" in text
    assert "lockstep, GPU: no GPUs" in text
    page = table.as_markdown([column, ABSENT], ["send", "recv"])
    assert "| recv | ✘ | ? |" in page


def test_page_has_every_verb() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert rows[1:] == list(VERBS) or rows == list(VERBS), "run `lockstep doctor --capabilities --format markdown`"
