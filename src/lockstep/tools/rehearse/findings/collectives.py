"""Collectives that not all ranks call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.tools.rehearse.events import RehearsedJob
from lockstep.tools.rehearse.findings.finding import Finding, Kind
from lockstep.tools.rehearse.line import Site
from lockstep.tools.rehearse.source import tests_around
from lockstep.topology import name_ranks

__all__ = ["KINDS"]

_RANK_WORDS = ("rank", "gpu", "is_main", "master", "is_chief")


@dataclass(frozen=True)
class _CollectiveCall:
    """One collective call of one rank: its description, and its line."""

    text: str
    site: Site | None


def _calls(job: RehearsedJob) -> dict[object, dict[int, list[_CollectiveCall]]]:
    """Group -> rank -> its calls, in order."""
    found: dict[object, dict[int, list[_CollectiveCall]]] = {}
    for process, event in job.each("sequence"):
        if process.rank is None:
            continue
        texts, lines = event.data["texts"], event.data["lines"]
        calls = [
            _CollectiveCall(texts[text], Site.load(lines[line]) if lines[line][0] else None)
            for text, line in event.data["calls"]
        ]
        group = (event.data["group"], tuple(event.data["ranks"]))
        found.setdefault(group, {}).setdefault(process.rank, calls)
    return found


def _parting(calls: Sequence[Sequence[_CollectiveCall]]) -> int | None:
    """Index of the first call that differs between ranks, or that one does not make; None if there is none."""
    for number in range(max(map(len, calls))):
        texts = {each[number].text if number < len(each) else None for each in calls}
        if len(texts) > 1:
            return number
    return None


def _is_about_rank(site: Site) -> bool:
    return any(word in name for names in tests_around(site.file, site.line) for name in names for word in _RANK_WORDS)


def _blame(callers: dict[_CollectiveCall, list[int]]) -> _CollectiveCall:
    """The call in a branch on the rank, else the one within most `if` statements, else that of the fewest ranks."""

    def order(call: _CollectiveCall) -> tuple[bool, int, int, list[int]]:
        assert call.site is not None
        num_tests = len(tests_around(call.site.file, call.site.line))
        return not _is_about_rank(call.site), -num_tests, len(callers[call]), callers[call]

    return min(callers, key=order)


def _partings(job: RehearsedJob) -> Iterator[tuple[str, Finding]]:
    finished = {process.rank for process in job.processes if process.finished}
    for by_rank in _calls(job).values():
        ranks = sorted(by_rank)
        if len(ranks) < 2:
            continue
        number = _parting([by_rank[rank] for rank in ranks])
        if number is None:
            continue
        parties: dict[_CollectiveCall | None, list[int]] = {}
        for rank in ranks:
            call = by_rank[rank][number] if number < len(by_rank[rank]) else None
            parties.setdefault(call, []).append(rank)
        if not finished.issuperset(parties.get(None, ())):
            continue  # A rank that makes no further call has failed for another reason, so the others are not to blame.
        callers = {call: who for call, who in parties.items() if call is not None and call.site is not None}
        if not callers:
            continue
        blamed = _blame(callers)
        assert blamed.site is not None
        who = callers[blamed]
        others = "; ".join(_describe(call, members) for call, members in parties.items() if call != blamed)
        kind = "rank-only-collective" if _is_about_rank(blamed.site) else "branch-dependent-collective"
        what = f"{name_ranks(who)} called {blamed.text}, but {others}"
        yield kind, Finding(kind, (blamed.site,), what, tuple(who))


def _describe(call: _CollectiveCall | None, ranks: Sequence[int]) -> str:
    if call is None:
        return f"{name_ranks(ranks)} called no further collective"
    return f"{name_ranks(ranks)} called {call.text} at {call.site}"


def _only(kind: str, job: RehearsedJob) -> Iterator[Finding]:
    return (finding for found, finding in _partings(job) if found == kind)


KINDS = (
    Kind(
        "rank-only-collective",
        "a collective that only some ranks call",
        "it is in a branch on the rank, and the other ranks never call it: nccl and gloo hang there until their "
        "timeout",
        "move it out of the branch, so that all ranks call it; what only one rank needs works without collectives "
        "(evaluate with model.module, save without a barrier inside the branch)",
        lambda job: _only("rank-only-collective", job),
    ),
    Kind(
        "branch-dependent-collective",
        "ranks call different collectives",
        "each rank's own data decides whether it calls this, so ranks get out of step: a hang, or sums of unrelated "
        "values",
        "agree across ranks: reduce the condition first (all_reduce of a flag), or call it on every path",
        lambda job: _only("branch-dependent-collective", job),
    ),
)
