"""Notes of the source, `[Note: …]`: one of each name, and what is cited is there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from docs.site.notes import CITATION, ROOT, Note, find_notes, page, slug

pytestmark = pytest.mark.usefixtures("no_garbage")

FOLDERS = ("src", "tests", "docs", "benchmarks", "examples")
ABOUT_NOTES = {Path(__file__), Path(__file__).with_name("test_site.py"), *(ROOT / "docs" / "site").glob("*.py")}
READ = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    if path.suffix in {".py", ".md"} and path not in ABOUT_NOTES
)


def in_one_line(text: str) -> str:
    """Citations go over the ends of lines, in comments too."""
    return re.sub(r"\n[ \t]*(#[ \t]+)?", " ", text)


def test_each_name_is_used_once() -> None:
    notes = find_notes()
    assert len(notes) > 100
    assert [name for name, times in Counter(slug(note.name) for note in notes).items() if times > 1] == []
    assert [note.name for note in notes if len(note.text.split()) < 10] == []


def test_every_cited_note_exists() -> None:
    notes = {note.name for note in find_notes()}
    cited = {
        f"{path.relative_to(ROOT)}: {citation[0]}"
        for path in READ
        for citation in CITATION.finditer(in_one_line(path.read_text()))
        if citation["name"] not in notes
    }
    assert not cited


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""A module.\n\n[Note: first] Says.\n\nMore of it.\n\n[Note: second] More.\n"""\n', ["first", "second"]),
        ("def f():\n    # [Note: in a comment] Because\n    # of this.\n    return 1\n", ["in a comment"]),
        ('"""Cites the [Note: first] of another, and\n[Note: second]."""\nx = "[Note: no docstring]"\n', []),
        ("x = 1  # See [Note: first].\n", []),
    ],
    ids=["docstring", "comment", "cited at the beginning of a line", "cited"],
)
def test_where_notes_begin(tmp_path: Path, source: str, expected: list[str]) -> None:
    folder = tmp_path / "src" / "lockstep"
    folder.mkdir(parents=True)
    (folder / "one.py").write_text(source)
    notes = find_notes(tmp_path)
    assert [note.name for note in notes] == expected
    assert {note.path for note in notes} <= {"src/lockstep/one.py"}


def test_a_note_ends_where_sections_begin(tmp_path: Path) -> None:
    (tmp_path / "src" / "lockstep").mkdir(parents=True)
    docstring = "A class.\n\n[Note: one] Says this.\n\nAnd this.\n\nArgs:\n    x: a number.\n"
    (tmp_path / "src" / "lockstep" / "one.py").write_text(f'"""{docstring}"""\n')
    assert [note.text for note in find_notes(tmp_path)] == ["Says this.\n\nAnd this."]


def test_page_has_an_anchor_for_each_note() -> None:
    notes = find_notes()
    text = page(notes)
    assert [note.name for note in notes if f"### {note.name} {{#{slug(note.name)}}}\n\n" not in text] == []
    assert slug('the name\n"mpi"') == slug('the name "mpi"') == "note-the-name-mpi"


def test_drawings_keep_their_lines_on_the_page() -> None:
    note = Note("phases", "So::\n\n    code\n\nFIRST\n  │ then\nLAST", "src/lockstep/one.py")
    assert page([note]).endswith(
        "## `lockstep/one.py`\n\n### phases {#note-phases}\n\nSo:\n\n    code\n\n```text\nFIRST\n  │ then\nLAST\n```\n"
    )
