"""Findings and their kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lockstep.tools.rehearse.events import RehearsedJob
from lockstep.tools.rehearse.line import Site

__all__ = ["Finding", "Kind"]


@dataclass(frozen=True)
class Finding:
    """Something that would fail on the cluster.

    Attributes:
        id: id of its kind.
        sites: the line to change, followed by the lines that called it; empty if no line is to blame.
        what: what was seen, with numbers, as a sentence without full stop.
        ranks: the ranks concerned; empty for all.
    """

    id: str
    sites: tuple[Site, ...]
    what: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of finding.

    Attributes:
        id: stable name, for programs that read reports.
        title: summary in a few words.
        why: what it does to a job on a cluster.
        fix: what to write instead.
        judge: returns all findings of this kind in a job's records.
        by_path: whether the same line reached through other callers is a separate finding.
        spans_families: whether it also compares ranks that were started separately; see `RehearsedJob.families`.
        is_failure: whether it means that the script has failed, even if its exit code is 0.
    """

    id: str
    title: str
    why: str
    fix: str
    judge: Callable[[RehearsedJob], Iterable[Finding]]
    by_path: bool = False
    spans_families: bool = False
    is_failure: bool = False
