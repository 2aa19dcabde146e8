"""What the processes of a rehearsal saw: each writes a file, the launcher reads all of them. Never imports torch."""

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
    """Something that was seen.

    Attributes:
        kind: which watcher saw it, and what.
        sites: the lines of the user's code that led there, the innermost first; may be empty.
        data: the rest, as the watcher says in its docstring.
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
        rank: in the group that it joined, else the number that its starter gave it; None for none.
        world_size: of that group, else 1.
        joined: whether it was in a group.
        finished: the script came to its end there.
        family: the same for processes that were started together, by one call of `mp.spawn`, or by one on each node
            and joined one group; empty for those that the rehearsal itself has started.
        starter: pid of the process that spawned it; 0 if the rehearsal itself has started it.
        pid: its number.
        events: what it saw, in the order of time.
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
    """All that the processes of a rehearsal saw.

    Attributes:
        processes: those that left a record, ranks in order; workers of data loaders come by their rank too.
        settings: of the rehearsal.
        unread: records that could not be read.
        joined: ranks that the rehearsal has started and that joined a group, those that left no record among them.
    """

    processes: tuple[Process, ...]
    settings: RehearsalSettings
    unread: tuple[str, ...] = field(default=())
    joined: tuple[int, ...] = field(default=())

    @property
    def world_size(self) -> int:
        """Number of ranks of the largest group that a process joined, as far as is known."""
        return max([1, len(self.joined), *(process.world_size for process in self.processes)])

    @property
    def has_group(self) -> bool:
        """Whether any process joined a group."""
        return bool(self.joined) or any(process.joined for process in self.processes)

    @property
    def silent(self) -> list[int]:
        """Ranks that the rehearsal has started and that left no record: they were killed."""
        recorded = {process.rank for process in self.processes if not process.family}
        return [rank for rank in range(self.num_started) if rank not in recorded]

    @property
    def num_started(self) -> int:
        """Processes that the rehearsal itself has started."""
        return self.settings.nodes * self.settings.processes_per_node

    def is_launched(self, process: Process) -> bool:
        """Whether the process joined a group of exactly those that the rehearsal has started, itself among them."""
        return process.joined and not process.family and process.world_size == self.num_started

    def families(self) -> list[RehearsedJob]:
        """One job for each group of ranks that were started together, so that none is compared with another's.

        Processes that joined no group, such as the one that started them, are in all.
        """
        names = sorted({process.family for process in self.processes if process.joined}) or [""]
        return [
            replace(self, processes=tuple(one for one in self.processes if one.family == name or not one.joined))
            for name in names
        ]

    def node_of(self, rank: int) -> int:
        """The pretended node that a rank is on."""
        return rank // max(1, self.world_size // self.settings.nodes)

    def each(self, kind: str) -> Iterator[tuple[Process, TraceEvent]]:
        """All events of one kind, with who saw them."""
        for process in self.processes:
            for event in process.of(kind):
                yield process, event

    def by_sites(self, kind: str) -> dict[tuple[Site, ...], list[tuple[Process, TraceEvent]]]:
        """Events of one kind by the lines that led to them."""
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
    """The record in a file, or why there is none."""
    try:
        return _load(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path.name}: {error}"


def read_records(folder: Path, settings: RehearsalSettings) -> RehearsedJob:
    """What all processes left in the job's private folder. A damaged record is left out, and named."""
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
