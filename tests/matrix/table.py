"""docs/versions.md, written anew row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.matrix import groups
from tests.matrix.environments import RELEASES
from tests.matrix.groups import Counts

__all__ = ["Row", "update"]

_COLUMNS = [group.name for group in groups.ALL]
_NONE = "–"
_HEADINGS = ["release", "torch", "Python", *_COLUMNS, "tests", "day"]
_HEAD = """# Versions of PyTorch

`make matrix` wrote this page: it installs each release in an environment of its own and runs the tests with it. A cell
has the numbers of tests that **passed/failed/skipped**. Lockstep refuses releases older than the first; with one newer
than the last it warns when a job starts.

"""


@dataclass(frozen=True)
class Row:
    """One release.

    Attributes:
        name: of the release.
        torch, python: versions.
        results: by group of tests; empty if it was not run.
        tests: "all", "short", or why it was not run.
        day: when, ISO.
    """

    name: str
    torch: str
    python: str
    results: Mapping[str, Counts]
    tests: str
    day: str

    def cells(self) -> list[str]:
        """In the order of the columns."""
        counts = [str(self.results[name]) if name in self.results else _NONE for name in _COLUMNS]
        return [self.name, self.torch, self.python, *counts, self.tests.replace("|", "/"), self.day]


def update(path: Path, row: Row) -> None:
    """Put a row into the table; those of other releases stay as they are, and so do cells that this run has not."""
    rows = dict(_read(path)) if path.exists() else {}
    cells, before = row.cells(), rows.get(row.name)
    if before is not None and row.results and before[-2] == cells[-2]:
        cells = [old if new == _NONE else new for old, new in zip(before, cells, strict=True)]
    rows[row.name] = cells
    lines = [_line(_HEADINGS), "|---" * len(_HEADINGS) + "|"]
    lines += [_line(rows[release.name]) for release in RELEASES if release.name in rows]
    path.write_text(_HEAD + "\n".join(lines) + "\n\n" + "\n".join(_explain()) + "\n")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _read(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The rows of a page that this module wrote with the same columns."""
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == len(_HEADINGS) and cells != _HEADINGS:
            yield cells[0], cells


def _explain() -> Iterator[str]:
    """What the columns stand for."""
    yield "| column | all | short |"
    yield "|---|---|---|"
    for whole, part in zip(groups.ALL, groups.SHORT, strict=True):
        texts = [" ".join(group.arguments) or "examples/train.py at 1, 2 and 3 ranks" for group in (whole, part)]
        yield _line([whole.name, *(f"`{text}`" for text in texts)])
