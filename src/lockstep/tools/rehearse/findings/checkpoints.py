"""Checkpoints: who writes, under which names, and onto which device they come back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from lockstep.tools.rehearse.findings.kind import Finding, Kind
from lockstep.tools.rehearse.record import Event, Job

__all__ = ["KINDS"]


def _written_by_all(job: Job) -> Iterator[Finding]:
    """Several ranks of a node save to one file from one line. One writer per node is right where disks are local."""
    writers: dict[tuple[object, str, int], dict[int, Event]] = defaultdict(dict)
    for process, event in job.each("save"):
        path = event.data["path"] or ""
        is_file = path != "" and not path.startswith("/dev/")
        if is_file and process.rank is not None and process.joined and event.site is not None:
            writers[event.site, path, job.node_of(process.rank)].setdefault(process.rank, event)
    for (_, path, _), by_rank in writers.items():
        if len(by_rank) > 1:
            event = next(iter(by_rank.values()))
            what = f"{len(by_rank)} ranks wrote {path}"
            yield Finding("checkpoint-by-every-rank", event.sites, what, tuple(sorted(by_rank)))


def _prefixed(job: Job) -> Iterator[Finding]:
    """All names of a saved dict of tensors begin with `module.`."""
    for _, event in job.each("save"):
        if event.data["prefixed"]:
            number, example = event.data["prefixed"], event.data["example"]
            what = f"all {number} names in the saved state begin with `module.`, such as {example}"
            yield Finding("module-prefix", event.sites, what)


def _loaded_elsewhere(job: Job) -> Iterator[Finding]:
    """A rank loads without map_location, and gets tensors on a device that is not its own."""
    for process, event in job.each("load"):
        foreign = event.data["foreign"]
        if not event.data["has_map_location"] and foreign and process.joined:
            names = ", ".join(f"cuda:{index}" for index in foreign)
            what = f"rank {process.rank}, which computes on cuda:{event.data['own']}, loaded tensors onto {names}"
            yield Finding("load-without-map-location", event.sites, what, (process.rank or 0,))


def _loaded_anything(job: Job) -> Iterator[Finding]:
    """torch.load without a word about weights_only."""
    for _, event in job.each("load"):
        if not event.data["has_weights_only"]:
            yield Finding("load-without-weights-only", event.sites, "torch.load is called without weights_only")


KINDS = (
    Kind(
        "checkpoint-by-every-rank",
        "every rank writes the checkpoint",
        "ranks overwrite each other's file while it is being written: on a shared file system that is a broken "
        "checkpoint sooner or later, and N times the traffic",
        "save on rank 0 only, to a temporary name, and rename it; lockstep.checkpoint.save does",
        _written_by_all,
    ),
    Kind(
        "module-prefix",
        "`module.` in the names of a saved state",
        "the state of the wrapper was saved: it does not load into the model itself, nor where it is not wrapped",
        "save model.module.state_dict()",
        _prefixed,
    ),
    Kind(
        "load-without-map-location",
        "a checkpoint comes back on another rank's GPU",
        "tensors go back to the device that they were saved from, usually cuda:0, on every rank: its memory fills up "
        "with N copies",
        'load with map_location="cpu", or with this rank\'s own device',
        _loaded_elsewhere,
    ),
    Kind(
        "load-without-weights-only",
        "torch.load without weights_only",
        "before PyTorch 2.6 it runs whatever code the file contains; from 2.6 on it refuses files that hold more than "
        "tensors: the same script behaves differently on the cluster's version",
        "pass weights_only=True, and save plain data beside the tensors",
        _loaded_anything,
    ),
)
