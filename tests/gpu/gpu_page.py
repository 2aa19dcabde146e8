"""The page of a run of `make gpu`, made from its gpu.json alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["render", "summary"]

Entry = Mapping[str, Any]

_PLACE = ("name", "torch", "commit")
_PREFIX = re.compile(r"^(?:\[\w+\]:?\s*)+")  # of a rank, by `lockstep run` and by torch


def render(report: Mapping[str, Any]) -> str:
    """The Markdown page beside gpu.json: what failed first, then what was measured, then every check.

    Args:
        report: as `gpu_run.report` makes it.
    """
    here = [report["environment"].get(name) for name in _PLACE]
    checks: Sequence[Entry] = [
        {name: value for name, value in entry.items() if name != "environment" or [*map(value.get, _PLACE)] != here}
        for entry in report["checks"]
    ]
    failed = [entry for entry in checks if entry["outcome"] in ("failed", "timed out")]
    measured = [entry for entry in checks if entry["name"].startswith("measure-") and entry["outcome"] == "passed"]
    parts = [
        "# On a GPU",
        "Generated from [gpu.json](gpu.json) by `make gpu`; do not edit. [GPUs](../../docs/gpu.md) says what it means.",
        f"**{summary(report)}**",
    ]
    if failed:
        lines = [f"- `{entry['name']}`, {entry['why']}: `{_cause(entry)}`" for entry in failed]
        parts += ["## What failed", "\n".join(lines)]
    if measured:
        lines = [f"- {_sentence(entry['why'])} {_facts(entry)}{_origin(entry)}" for entry in measured]
        parts += ["## What was measured", "\n".join(lines)]
    rows = [f"| `{entry['name']}` | {entry['why']} | {_outcome(entry)} |" for entry in checks]
    parts += ["## Every check", "\n".join(["| check | what it shows | outcome |", "| --- | --- | --- |", *rows])]
    return "\n\n".join(parts) + "\n"


def summary(report: Mapping[str, Any]) -> str:
    """One sentence: which device, which torch, when, and how many checks passed, failed and were skipped."""
    environment = report["environment"]
    outcomes = [entry["outcome"] for entry in report["checks"]]
    counts = [f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "timed out", "skipped")]
    counts = [text for text in counts if not text.startswith("0 ")]
    and_before = " and runs before it" if any("environment" in entry for entry in report["checks"]) else ""
    device = f"{environment['name']} ({environment['devices']} GPU)" if "name" in environment else "CPU"
    return (
        f"{device}, torch {environment['torch']}, "
        f"{environment['date'][:10]}, commit {environment['commit'][:10]}{and_before}: {', '.join(counts)}."
    )


def _cause(entry: Entry) -> str:
    """The line of the output that names the error; the reason where none does."""
    lines = [_PREFIX.sub("", line) for line in entry.get("tail", "").splitlines()]
    named = [line for line in lines if line.partition(": ")[0].endswith("Error") and line.partition(": ")[2]]
    return (named[-1] if named else str(entry.get("reason", ""))).replace("`", "'")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ":"


def _facts(entry: Entry) -> str:
    shown = {name: value for name, value in entry.get("facts", {}).items() if isinstance(value, int | float | str)}
    texts = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()]
    return (", ".join(texts) or "see gpu.json") + "."


def _outcome(entry: Entry) -> str:
    if entry["outcome"] == "passed":
        return f"passed{_origin(entry)}"
    if entry["outcome"] == "skipped":
        return f"skipped: {entry.get('reason', '')}{_origin(entry)}"
    return f"**{entry['outcome']}**{_origin(entry)}"


def _origin(entry: Entry) -> str:
    """Of what an earlier run has found: where and when."""
    where = entry.get("environment")
    if where is None:
        return ""
    return f" ({where['name']}, torch {where['torch']}, {where['date'][:10]}, commit {where['commit'][:10]})"
