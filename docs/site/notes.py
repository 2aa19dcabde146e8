"""The notes of the source: paragraphs of docstrings and comments that begin with `[Note: name]`, and who cites them."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CITATION", "ROOT", "Note", "find_notes", "page", "slug"]

ROOT = Path(__file__).parents[2]

CITATION = re.compile(r"\[Note:\s+(?P<name>[^\]…]+)\]")
"""A note by its name, where it begins and where it is cited. `[Note: …]` is about notes, and is none."""

_BEGINNING = re.compile(r"(?:\A|\n\n)\[Note: (?P<name>[^\]…]+)\](?P<text>.*?)(?=\n\n(?:\[Note: |\w+:\n)|\Z)", re.DOTALL)
_DRAWING = re.compile(r"^[^`\n]*[│├└┌─]{1,}", re.MULTILINE)


@dataclass(frozen=True)
class Note:
    """One note: its name, what it says (Markdown), and the file, from the root, that says it."""

    name: str
    text: str
    path: str


def slug(name: str) -> str:
    """The anchor of a note on the page of notes, also when its name was cited over a line's end."""
    return "note-" + re.sub(r"[^a-z0-9]+", "-", " ".join(name.split()).lower()).strip("-")


def find_notes(root: Path = ROOT) -> list[Note]:
    """Every note in the package's source, by file and place in it."""
    notes = []
    for path in sorted((root / "src" / "lockstep").rglob("*.py")):
        for passage in _passages(path.read_text()):
            for begun in _BEGINNING.finditer(passage):
                paragraphs = [part for part in begun["text"].strip().split("\n\n") if part.strip()]
                notes.append(Note(begun["name"], "\n\n".join(paragraphs), str(path.relative_to(root))))
    return notes


def _passages(source: str) -> Iterator[str]:
    """Docstrings and blocks of comments, without their indentation."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield inspect.cleandoc(text)
    for block in re.finditer(r"(?:^[ \t]*#.*\n?)+", source, re.MULTILINE):
        yield re.sub(r"^# ?", "", textwrap.dedent(block[0]), flags=re.MULTILINE)


def page(notes: list[Note]) -> str:
    """The page of notes: a heading for each, under the file that it stands in."""
    lines = [
        "# Notes",
        "",
        "Invariants, proofs and measurements that stand in the source beside the code that keeps them. "
        "A comment or a page that relies on one cites it as `[Note: its name]`.",
    ]
    path = ""
    for note in notes:
        if note.path != path:
            path = note.path
            lines += ["", f"## `{path.removeprefix('src/')}`"]
        lines += ["", f"### {note.name} {{#{slug(note.name)}}}", "", _as_markdown(note.text)]
    return "\n".join(lines) + "\n"


def _as_markdown(text: str) -> str:
    """A note as Markdown: drawings keep their lines, and a code block comes after `:`."""
    paragraphs = re.sub(r"::$", ":", text, flags=re.MULTILINE).split("\n\n")
    return "\n\n".join(f"```text\n{one}\n```" if _DRAWING.search(one) else one for one in paragraphs)
