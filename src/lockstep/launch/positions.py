"""Determines where the ranks are, or were: in which collective, since when, at which line of the user's code.

Read from the status file of each rank in the attempt's private folder (`lockstep.rank_status`), which includes ranks
that were killed. The launcher reads them at the first failure, before it stops any rank, and on every SIGUSR1.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.frames import split_site
from lockstep.rank_status import DEFAULT_GROUP, Position, has_raised, read_positions
from lockstep.topology import name_ranks

__all__ = [
    "RankStatus",
    "describe_interrupt",
    "describe_position",
    "describe_statuses",
    "find_missing",
    "format_table",
    "look",
    "short_path",
]

_MAX_PLACES = 4
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank: where it is.

    Attributes:
        rank: global rank.
        pid: pid of its process.
        state: the scheduler's letter for the process; X if it has ended.
        positions: its position in each group in which it has made a call, the latest first.
        has_raised: whether it has raised an exception in a world, and the others were told.
    """

    rank: int
    pid: int
    state: str
    positions: tuple[Position, ...]
    has_raised: bool = False

    @property
    def latest(self) -> Position | None:
        """Its latest position; None if it has not made a call in a recorded group."""
        return self.positions[0] if self.positions else None

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP, Ctrl-Z, a debugger)."""
        return self.state in "Tt"

    def describe(self) -> str:
        """`in all_reduce #57 at train.py:81`, or `after` it; empty if nothing is known."""
        return "" if self.latest is None else describe_position(self.latest)


def describe_position(position: Position) -> str:
    """`in all_reduce #57 at train.py:81`; with the group's name unless it is the default one."""
    group = "" if position.group == DEFAULT_GROUP else f" of {position.group}"
    if position.waiting:
        call, _, site = position.waiting.rpartition(" at ")
        return f"in {call}{group} at {_short_site(split_site(site)[0])}"
    word = "in" if position.inside else "after"
    site, called = split_site(position.site)
    what = f"{called} (collective #{position.number})" if called else f"{position.operation} #{position.number}"
    return f"{word} {what}{group} at {_short_site(site)}"


def _short_site(site: str) -> str:
    """`train.py:81` of `/home/me/train.py:81 in main`."""
    location = site.rpartition(" in ")[0] or site
    path, colon, line = location.rpartition(":")
    return f"{short_path(path)}{colon}{line}" if colon else location


def short_path(file: str) -> str:
    """The path relative to the current folder, if it is below it."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def look(folder: Path, pids: Mapping[int, int]) -> dict[int, RankStatus]:
    """Read the current status of all ranks.

    Args:
        folder: the attempt's private folder.
        pids: rank -> pid of all ranks of the attempt.
    """
    found = read_positions(folder, pids)
    return {
        rank: RankStatus(rank, pid, _state_of(pid), tuple(found.get(rank, ())), has_raised(folder, rank))
        for rank, pid in pids.items()
    }


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def describe_statuses(statuses: Mapping[int, RankStatus]) -> str:
    """`ranks 0, 1, 3 were in all_reduce #57 at train.py:81; rank 4 was after …`; empty if nothing is known."""
    ranks: dict[str, list[int]] = {}
    for rank, status in sorted(statuses.items()):
        if status.latest is not None:
            ranks.setdefault(status.describe(), []).append(rank)
    # The largest party comes first.
    groups = sorted(ranks.items(), key=lambda item: -len(item[1]))
    parts = [f"{name_ranks(own)} {'was' if len(own) == 1 else 'were'} {text}" for text, own in groups[:_MAX_PLACES]]
    if len(groups) > _MAX_PLACES:
        parts.append(f"{name_ranks(sorted(rank for _, own in groups[_MAX_PLACES:] for rank in own))} elsewhere")
    return "; ".join(parts)


def describe_interrupt(number: int, grace_s: float, statuses: str) -> str:
    """One line after a signal: which signal it was, how to end sooner, and where the ranks were.

    Args:
        number: number of the signal.
        grace_s: seconds until SIGKILL.
        statuses: from `describe_statuses`.
    """
    is_key = number == signal.SIGINT
    name = "Ctrl-C" if is_key else signal.Signals(number).name
    return (
        f"lockstep: {name}: stopping; ranks have {grace_s:g} s to exit "
        f"({'press' if is_key else 'send'} {name} again to kill them)"
        f"{f'; {statuses}' if statuses else ''}\n"
    )


def find_missing(statuses: Mapping[int, RankStatus], rank: int) -> tuple[int, ...]:
    """The ranks that have not arrived where `rank` waits: those with a lower count in that group.

    Args:
        statuses: the status of all ranks of the job.
        rank: a rank that waited in vain in its latest collective.
    """
    waiting = statuses[rank].latest if rank in statuses else None
    if waiting is None:
        return ()
    missing = []
    for other, status in statuses.items():
        same = next((one for one in status.positions if one.group == waiting.group), None)
        # In a group of some ranks, one without any calls may not be a member at all.
        has_come = same.number >= waiting.number if same is not None else waiting.group != DEFAULT_GROUP
        if not has_come:
            missing.append(other)
    return tuple(missing)


def format_table(statuses: Mapping[int, RankStatus]) -> str:
    """One line for each rank: rank, pid, state, current call and since when, and its line."""
    lines = ["lockstep: where every rank is"]
    for rank, status in sorted(statuses.items()):
        latest = status.latest
        if latest is None:
            what = "no collective yet"
        else:
            since = f", for {latest.for_s:.1f} s" if latest.inside and not latest.waiting else ""
            if not latest.inside and not latest.waiting:
                since = f", which it entered {latest.for_s:.1f} s ago"
            what = f"{describe_position(latest)}{since}"
            if latest.call and not latest.waiting:
                what += f": {latest.call}"
        lines.append(f"  rank {rank} (pid {status.pid}), {_STATES.get(status.state, status.state)}: {what}")
    return "\n".join([*lines, ""])
