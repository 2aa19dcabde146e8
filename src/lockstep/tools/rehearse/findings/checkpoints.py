"""Checkpoints: which ranks write them, the names inside, and the device that they are loaded onto."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep.tools.rehearse.events import Process, RehearsedJob, TraceEvent
from lockstep.tools.rehearse.findings.finding import Finding, Kind

__all__ = ["KINDS"]


@dataclass
class _Writers:
    """The processes that wrote one file from one line.

    Attributes:
        event: the event of the first of them.
        by_node: for each copy of the job and each of its nodes, the ranks that wrote there.
    """

    event: TraceEvent
    by_node: dict[tuple[str, int], set[int]] = field(default_factory=lambda: defaultdict(set))

    @property
    def copies(self) -> set[str]:
        return {copy for copy, _ in self.by_node}


def _copy_of(job: RehearsedJob, process: Process) -> str:
    """Which independent copy of the job a process belongs to; empty for the job as a whole.

    A copy is a parent with the ranks that it started for a group, or, without any group, each single process.
    """
    own = process.family or next((one.family for one in job.processes if one.starter == process.pid), "")
    if own:
        starters = {one.starter for one in job.processes if one.family == own}
        return "" if len(starters) > 1 else str(starters.pop())
    return "" if job.has_group else f"rank {process.rank}"


def _writers(job: RehearsedJob) -> list[tuple[str, _Writers]]:
    """(path, its writers) for each line that writes a file."""
    found: dict[tuple[object, str], _Writers] = {}
    for process, event in job.each("save"):
        path = event.data["path"] or ""
        if path == "" or path.startswith("/dev/") or process.rank is None or event.site is None:
            continue
        copy = _copy_of(job, process)
        node = 0 if copy else job.node_of(process.rank)
        found.setdefault((event.site, path), _Writers(event)).by_node[copy, node].add(process.rank)
    return [(path, writers) for (_, path), writers in found.items()]


def _written_by_all(job: RehearsedJob) -> Iterator[Finding]:
    """Several ranks of a node save to one file from one line."""
    for path, writers in _writers(job):
        ranks = max(writers.by_node.values(), key=len)
        if len(ranks) > 1:
            what = f"{len(ranks)} ranks wrote {path}"
            yield Finding("checkpoint-by-every-rank", writers.event.sites, what, tuple(sorted(ranks)))


def _written_by_nodes(job: RehearsedJob) -> Iterator[Finding]:
    """One rank per node saves to one file from one line, which is only right on node-local disks."""
    for path, writers in _writers(job):
        ranks = sorted(rank for by_node in writers.by_node.values() for rank in by_node)
        nodes, is_one_each = len(writers.by_node), all(len(each) == 1 for each in writers.by_node.values())
        if len(writers.copies) == 1 and nodes > 1 and is_one_each and not writers.event.data["is_local"]:
            what = f"ranks {', '.join(map(str, ranks))}, one on each of {nodes} nodes, wrote {path}"
            yield Finding("checkpoint-by-every-node", writers.event.sites, what, tuple(ranks))


def _written_by_copies(job: RehearsedJob) -> Iterator[Finding]:
    """Independent copies of the script save to one file from one line."""
    for path, writers in _writers(job):
        num_copies = len(writers.copies)
        if num_copies > 1:
            what = f"{num_copies} copies of the script, not joined in a group, wrote {path}"
            yield Finding("checkpoint-by-copies", writers.event.sites, what)


def _prefixed(job: RehearsedJob) -> Iterator[Finding]:
    """All names of a saved dict of tensors begin with `module.`."""
    for _, event in job.each("save"):
        if event.data["prefixed"]:
            number, example = event.data["prefixed"], event.data["example"]
            what = f"all {number} names in the saved state begin with `module.`, such as {example}"
            yield Finding("module-prefix", event.sites, what)


def _loaded_elsewhere(job: RehearsedJob) -> Iterator[Finding]:
    """A rank loads without map_location, and gets tensors on another rank's device."""
    for process, event in job.each("load"):
        foreign = event.data["foreign"]
        if not event.data["has_map_location"] and foreign and process.joined:
            names = ", ".join(f"cuda:{index}" for index in foreign)
            what = f"rank {process.rank}, which computes on cuda:{event.data['own']}, loaded tensors onto {names}"
            yield Finding("load-without-map-location", event.sites, what, (process.rank or 0,))


def _loaded_anything(job: RehearsedJob) -> Iterator[Finding]:
    """torch.load without weights_only."""
    for _, event in job.each("load"):
        if not event.data["has_weights_only"]:
            yield Finding("load-without-weights-only", event.sites, "torch.load is called without weights_only")


KINDS = (
    Kind(
        "checkpoint-by-every-rank",
        "every rank writes the checkpoint",
        "ranks overwrite each other's file while writing it: on a shared file system this breaks a checkpoint sooner "
        "or later, and causes N times the traffic",
        "save on rank 0 only, to a temporary name, and rename it, as lockstep.checkpoint.save does",
        _written_by_all,
    ),
    Kind(
        "checkpoint-by-every-node",
        "one rank of every node writes the checkpoint",
        "if the nodes share the file system, as they do where a script starts, they overwrite each other's file "
        "while writing it",
        "save on global rank 0 (RANK, not LOCAL_RANK); if every node has its own disk, use a folder on that",
        _written_by_nodes,
        spans_families=True,
    ),
    Kind(
        "checkpoint-by-copies",
        "copies of the script write one checkpoint",
        "each trains independently, and the file is that of the last one, or parts of several",
        "let all ranks join one group and save on its rank 0, or give each copy its own file",
        _written_by_copies,
        spans_families=True,
    ),
    Kind(
        "module-prefix",
        "`module.` in the names of a saved state",
        "the state of the wrapper was saved: it does not load into the bare model",
        "save model.module.state_dict()",
        _prefixed,
    ),
    Kind(
        "load-without-map-location",
        "a checkpoint is loaded onto another rank's GPU",
        "tensors return to the device that they were saved from, usually cuda:0, on every rank: its memory fills up "
        "with N copies",
        'load with map_location="cpu", or with this rank\'s own device',
        _loaded_elsewhere,
    ),
    Kind(
        "load-without-weights-only",
        "torch.load without weights_only",
        "before PyTorch 2.6 it runs whatever code the file contains; from 2.6 on it refuses files that hold more than "
        "tensors: the same script behaves differently on the cluster's version",
        "pass weights_only=True, and save plain data next to the tensors",
        _loaded_anything,
    ),
)
