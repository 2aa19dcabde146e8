"""Formats the table of operations, backends and devices, laid out as in PyTorch's documentation."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lockstep.tools.capabilities.measure import Column

__all__ = ["as_json", "as_markdown", "as_text"]

WORKS, FAILS, UNKNOWN = "✓", "✘", "?"
_DEVICES = {"cpu": "CPU", "cuda": "GPU"}


def _mark(column: Column, verb: str) -> str:
    if column.absent:
        # nccl never supports the CPU; anything else is unknown because this machine lacks it.
        return FAILS if column.backend == "nccl" and column.device == "cpu" else UNKNOWN
    return FAILS if column.troubles[verb] else WORKS


def as_text(columns: Sequence[Column], verbs: Sequence[str]) -> str:
    """The table as text for a terminal, with reasons below it."""
    width = max(len(word) for word in ("Backend", *verbs))
    names = [column.backend if index % 2 == 0 else "" for index, column in enumerate(columns)]
    lines = [
        f"{'Backend':{width}}  " + "  ".join(f"{name:8}" for name in names).rstrip(),
        f"{'Device':{width}}  " + "  ".join(f"{_DEVICES[column.device]:8}" for column in columns).rstrip(),
    ]
    for verb in verbs:
        marks = "  ".join(f"{_mark(column, verb):8}" for column in columns)
        lines += [f"{verb:{width}}  {marks}".rstrip()]
    return "\n".join([*lines, "", *_legend(columns)]) + "\n"


def as_markdown(columns: Sequence[Column], verbs: Sequence[str]) -> str:
    """The table in Markdown."""
    head = [f"{column.backend}, {_DEVICES[column.device]}" for column in columns]
    lines = ["| | " + " | ".join(head) + " |", "|---|" + ":-:|" * len(columns)]
    lines += [f"| {verb} | " + " | ".join(_mark(column, verb) for column in columns) + " |" for verb in verbs]
    return "\n".join([*lines, "", *(f"- {line}" for line in _legend(columns))]) + "\n"


def as_json(columns: Sequence[Column], verbs: Sequence[str]) -> str:
    """The table as JSON: a list of columns; `works` is true, false, or null if it could not be measured."""
    entries = [
        {
            "backend": column.backend,
            "device": column.device,
            "absent": column.absent or None,
            "verbs": {verb: _as_entry(column, verb) for verb in verbs},
        }
        for column in columns
    ]
    return json.dumps(entries, indent=2) + "\n"


def _as_entry(column: Column, verb: str) -> dict[str, object]:
    if column.absent:
        return {"works": None, "trouble": None}
    return {"works": not column.troubles[verb], "trouble": column.troubles[verb] or None}


def _legend(columns: Sequence[Column]) -> list[str]:
    lines = [
        f"{WORKS} works, with the right result; {FAILS} does not work; {UNKNOWN} not tested, as something is missing"
    ]
    for column in columns:
        where = f"{column.backend}, {_DEVICES[column.device]}"
        if column.absent:
            lines.append(f"{where}: {column.absent}")
        for verb, trouble in column.troubles.items():
            if trouble:
                lines.append(f"{where}, {verb}: {trouble if len(trouble) <= 160 else trouble[:159] + '…'}")
    return lines
