"""What a finding is."""

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
        id: of its kind.
        sites: the line to change first, then the lines that called it; empty where no line is to blame.
        what: what was seen, with numbers, as a sentence without full stop.
        ranks: that saw it; empty for a matter of all.
    """

    id: str
    sites: tuple[Site, ...]
    what: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of finding.

    Attributes:
        id: stable, for scripts that read reports.
        title: in a few words.
        why: what it does to a job on a cluster.
        fix: what to write instead.
        judge: finds all of this kind in what a job's processes saw.
        by_path: the callers of the blamed line count, too: the same line on another path is another finding.
        spans_families: it compares ranks that were started apart, too; see `RehearsedJob.families`.
        is_failure: the script has failed, even where its exit code is 0.
    """

    id: str
    title: str
    why: str
    fix: str
    judge: Callable[[RehearsedJob], Iterable[Finding]]
    by_path: bool = False
    spans_families: bool = False
    is_failure: bool = False
