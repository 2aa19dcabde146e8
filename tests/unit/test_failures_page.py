"""docs/failures.md is what its stored results say, and these are of the cases that there are."""

from __future__ import annotations

from docs.failures.cases import CASES, line_of
from docs.failures.measure import PAGE, SYSTEMS, load, render


def test_rows_are_the_cases() -> None:
    measured = [(row["case"], row["system"]) for row in load()["rows"]]
    assert measured == [(case.name, system) for case in CASES for system in SYSTEMS], "run `make failures`"


def test_page_is_made_of_the_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == render(load()), "run `make failures`, or `python -m docs.failures.measure page`"
    assert all(f"| {case.title} |" in text for case in CASES)


def test_lockstep_names_everything_in_the_stored_results() -> None:
    for row in load()["rows"]:
        if row["system"] == "lockstep":
            assert len(row["named"]) == 6, row


def test_every_case_marks_its_lines() -> None:
    for case in CASES:
        assert line_of(case.line).startswith("cases.py:")
        assert line_of(case.odd_line).startswith("cases.py:")
