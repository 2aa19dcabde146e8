"""The records of a rehearsal: each process writes a file, and the launcher reads them all. Never imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.rank_status import find_joined
from lockstep.tools.rehearse.line import Site
from lockstep.tools.rehearse.settings import RehearsalSettings

__all__ = ["Process", "RehearsedJob", "TraceEvent", "read_records"]

_PATTERN = "rehearsal-*.json"


@dataclass(frozen=True)
class TraceEvent:
    """One recorded event.

    Attributes:
        kind: kind of event; the docstrings in `watch` define them.
        sites: the lines of the user's code that led to it, innermost first; may be empty.
        data: the other fields, as documented by the watcher that recorded it.
    """

    kind: str
    sites: tuple[Site, ...]
    data: Mapping[str, Any]

    @property
    def site(self) -> Site | None:
        """The innermost line, or None."""
        return self.sites[0] if self.sites else None


@dataclass(frozen=True)
class Process:
    """One process of the job.

    Attributes:
        rank: its rank in the group that it joined, else that of the process that spawned it, or its number among those
            that the rehearsal itself started; None if unknown.
        world_size: size of that group, else 1.
        joined: whether it joined a group.
        finished: whether the script ran to its end in this process.
        family: the same for processes that were started together, by one call of `mp.spawn`, or by one such call per
            node if they joined one group; empty for those that the rehearsal itself started.
        starter: pid of the process that spawned it; 0 if the rehearsal itself started it.
        pid: its process id.
        events: what it recorded, in order of time.
    """

    rank: int | None
    world_size: int
    joined: bool
    finished: bool
    pid: int
    events: tuple[TraceEvent, ...]
    family: str = ""
    starter: int = 0

    def of(self, kind: str) -> Iterator[TraceEvent]:
        """Its events of one kind."""
        return (event for event in self.events if event.kind == kind)


@dataclass(frozen=True)
class RehearsedJob:
    """The records of all processes of a rehearsal.

    Attributes:
        processes: those that left a record, sorted by rank; workers of data loaders appear under their rank.
        settings: settings of the rehearsal.
        unread: records that could not be read, and why.
        joined: ranks started by the rehearsal that joined a group, including those that left no record.
    """

    processes: tuple[Process, ...]
    settings: RehearsalSettings
    unread: tuple[str, ...] = field(default=())
    joined: tuple[int, ...] = field(default=())

    @property
    def world_size(self) -> int:
        """Number of ranks of the largest known group that a process joined; at least 1."""
        return max([1, len(self.joined), *(process.world_size for process in self.processes)])

    @property
    def has_group(self) -> bool:
        """Whether any process joined a group."""
        return bool(self.joined) or any(process.joined for process in self.processes)

    @property
    def silent(self) -> list[int]:
        """Ranks started by the rehearsal that left no record, because they were killed."""
        recorded = {process.rank for process in self.processes if not process.family}
        return [rank for rank in range(self.num_started) if rank not in recorded]

    @property
    def num_started(self) -> int:
        """Number of processes that the rehearsal itself started."""
        return self.settings.nodes * self.settings.processes_per_node

    def is_launched(self, process: Process) -> bool:
        """Whether the rehearsal started the process, and it joined a group of exactly the processes so started."""
        return process.joined and not process.family and process.world_size == self.num_started

    def families(self) -> list[RehearsedJob]:
        """One job per family of ranks, so that only ranks that were started together are compared.

        Processes that joined no group, such as the one that started them, are in every job.
        """
        names = sorted({process.family for process in self.processes if process.joined}) or [""]
        return [
            replace(self, processes=tuple(one for one in self.processes if one.family == name or not one.joined))
            for name in names
        ]

    def node_of(self, rank: int) -> int:
        """The simulated node that a rank is on."""
        return rank // max(1, self.world_size // self.settings.nodes)

    def each(self, kind: str) -> Iterator[tuple[Process, TraceEvent]]:
        """All events of one kind, each with the process that recorded it."""
        for process in self.processes:
            for event in process.of(kind):
                yield process, event

    def by_sites(self, kind: str) -> dict[tuple[Site, ...], list[tuple[Process, TraceEvent]]]:
        """Events of one kind, grouped by the lines that led to them."""
        found: dict[tuple[Site, ...], list[tuple[Process, TraceEvent]]] = {}
        for process, event in self.each(kind):
            found.setdefault(event.sites, []).append((process, event))
        return found


def _load(path: Path) -> Process:
    raw = json.loads(path.read_text(encoding="utf-8"))
    events = tuple(
        TraceEvent(one["kind"], tuple(Site.load(values) for values in one["sites"]), one["data"])
        for one in raw["events"]
    )
    who = (raw["rank"], raw["world_size"], raw["joined"], raw["finished"], raw["pid"])
    return Process(*who, events, raw["family"], raw["starter"])


def _load_or_say(path: Path) -> Process | str:
    """The record in a file, or the reason why it cannot be read."""
    try:
        return _load(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path.name}: {error}"


def read_records(folder: Path, settings: RehearsalSettings) -> RehearsedJob:
    """Read the records in the job's private folder. Damaged ones are listed in `unread`."""
    processes, unread = [], []
    for path in sorted(folder.glob(_PATTERN)):
        found = _load_or_say(path)
        if isinstance(found, str):
            unread.append(found)
        else:
            processes.append(found)
    processes.sort(key=lambda process: (process.rank is None, process.rank or 0, process.pid))
    job = RehearsedJob(tuple(processes), settings, tuple(unread))
    return replace(job, joined=tuple(find_joined(folder, range(job.num_started))))
