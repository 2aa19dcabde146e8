"""Writes docs/torch-internals.md: `python -m docs.site.torch_internals > docs/torch-internals.md`."""

from __future__ import annotations

import sys

from lockstep.torch_private.record import NameRecord, Use
from lockstep.torch_private.table import table

__all__ = ["render"]

_HEAD = """\
# Which private parts of PyTorch Lockstep uses

Written by `python -m docs.site.torch_internals` from the table in `src/lockstep/torch_private`. One test compares the
two, another finds uses without a record. Checked against torch 2.13. A release of torch that lacks one of these names
has the effect in the last column; Lockstep warns once if something is disabled.
"""

_SECTIONS = (
    ("Replaced", (Use.PATCH,)),
    ("Added", (Use.ADD,)),
    ("Overridden in subclasses, where torch calls them", (Use.OVERRIDE,)),
    ("Read or called", (Use.READ, Use.ATTRIBUTE)),
    ("Undocumented behaviour that Lockstep relies on", (Use.BEHAVIOUR,)),
)


def _row(record: NameRecord) -> str:
    until = f" to {record.until}" if record.until else ""
    cells = (f"`{record.name}`", record.when, record.why, f"{record.since}{until}", record.without)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def render() -> str:
    """The page, as Markdown."""
    parts = [_HEAD]
    for title, uses in _SECTIONS:
        rows = [_row(record) for record in table().values() if record.use in uses]
        head = "| name | when | why | since torch | without it |\n|---|---|---|---|---|"
        parts.append(f"## {title}\n\n{head}\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(render())
