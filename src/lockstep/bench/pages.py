"""Tables and pages, formatted as plain text for a terminal and as Markdown for a file.

>>> table = Table("Sizes.", ["tensor", "time"], [["4 B", "25 µs"], ["1 MiB", "106 µs"]])
>>> print(as_text([table]))
tensor    time
4 B      25 µs
1 MiB   106 µs
Sizes.
>>> print(as_markdown([table]))
| tensor | time |
| --- | ---: |
| 4 B | 25 µs |
| 1 MiB | 106 µs |
<BLANKLINE>
Sizes.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.bench.results import Result

__all__ = [
    "Block",
    "Table",
    "as_markdown",
    "as_text",
    "format_bytes",
    "format_seconds",
    "markdown_page",
    "markdown_table",
    "notes_of",
    "three_digits",
]

_MIB = 1024 * 1024
_TITLES = {
    "comm": "Every verb on every backend",
    "scaling": "Strong and weak scaling",
    "strategies": "Every way to train",
}


@dataclass(frozen=True)
class Table:
    """Rows under a header.

    Attributes:
        caption: text below the table; may be empty.
        header: name of each column.
        rows: cells, one per column in each row.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


Block = str | Table
"""A part of a page: a table, or a paragraph of Markdown (`## …` is a heading)."""


def as_text(blocks: Sequence[Block]) -> str:
    """Text for a terminal: columns aligned by spaces, without Markdown. Paragraphs keep their line breaks."""
    return "\n\n".join(_plain_table(block) if isinstance(block, Table) else _plain(block) for block in blocks)


def as_markdown(blocks: Sequence[Block]) -> str:
    """Markdown for a file."""
    parts = []
    for block in blocks:
        if isinstance(block, str):
            parts.append(block)
            continue
        parts.append(markdown_table(block.header, block.rows))
        if block.caption:
            parts.append(block.caption)
    return "\n\n".join(parts)


def markdown_page(result: Result, blocks: Sequence[Block], name: str, *, has_plot: bool) -> str:
    """The page of a result: its tables, its plot and its machine.

    Args:
        result: the result.
        blocks: its tables.
        name: name of the result's file, without `.json`; that of its case unless the file was renamed.
        has_plot: whether there is a plot next to it.
    """
    title = _title(result.case, name)
    parts = [f"# {title}", *(f"**{note}**" for note in notes_of(result)), as_markdown(blocks)]
    if has_plot:
        parts.append(f"![{title}]({name}.png)")
    parts += [f"*{result.environment.summary()}.*", f"Generated from [{name}.json]({name}.json); do not edit."]
    return "\n\n".join(parts) + "\n"


def _title(case: str, name: str) -> str:
    """The title of a page: what its benchmark measures, and what the name of the result adds.

    >>> _title("comm", "comm_2_ranks"), _title("strategies", "strategies"), _title("comm", "mine")
    ('Every verb on every backend, 2 ranks', 'Every way to train', 'Every verb on every backend, mine')
    """
    added = name.removeprefix(case).strip("_").replace("_", " ")
    return ", ".join(filter(None, (_TITLES.get(case, case), added)))


def notes_of(result: Result) -> list[str]:
    """Warnings to precede the numbers: of a run that was quick, cut short, or on a busy machine."""
    notes = []
    if result.quick:
        notes.append("A quick run: its numbers mean nothing.")
    if not result.complete:
        notes.append("This run was cut short: results are incomplete.")
    if result.environment.load > 0.5:
        notes.append(f"The machine was busy when the run began (load {result.environment.load}): expect noise.")
    return notes


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_seconds(seconds: float) -> str:
    """Format with three significant digits and a suitable unit.

    >>> format_seconds(0.0000213), format_seconds(0.1234), format_seconds(5.0)
    ('21.3 µs', '123 ms', '5.00 s')
    """
    unit, factor = next(
        ((unit, factor) for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if seconds * factor >= 0.9995),
        ("ns", 1e9),
    )
    return f"{three_digits(seconds * factor)} {unit}"


def format_bytes(count: int) -> str:
    """Format a size in binary units.

    >>> format_bytes(4), format_bytes(65536), format_bytes(26214400)
    ('4 B', '64 KiB', '25 MiB')
    """
    for unit, factor in (("MiB", _MIB), ("KiB", 1024)):
        if count >= factor:
            return f"{count / factor:g} {unit}"
    return f"{count} B"


def three_digits(value: float) -> str:
    """Format with three significant digits, or as an integer if that has more.

    >>> three_digits(1.2345), three_digits(45.678), three_digits(1234.5)
    ('1.23', '45.7', '1234')
    """
    for limit, digits in ((9.995, 2), (99.95, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"


def _plain_table(table: Table) -> str:
    """Left-align the first column, right-align the others."""
    lines = [[_plain(cell) for cell in line] for line in (table.header, *table.rows)]
    widths = [max(_width(line[column]) for line in lines) for column in range(len(table.header))]
    text = []
    for first, *rest in lines:
        cells = [first + " " * (widths[0] - _width(first))]
        cells += [" " * (width - _width(cell)) + cell for cell, width in zip(rest, widths[1:], strict=True)]
        text.append("  ".join(cells).rstrip())
    return "\n".join([*text, *([_plain(table.caption)] if table.caption else [])])


def _plain(text: str) -> str:
    """Strip Markdown's markup: emphasis, code, links, headings."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\*\*|`|^#+ ", "", text, flags=re.MULTILINE)


def _width(text: str) -> int:
    return sum(not unicodedata.combining(character) for character in text)
