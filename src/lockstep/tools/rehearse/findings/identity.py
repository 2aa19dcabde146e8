"""Ranks that take themselves for somebody else."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from lockstep.tools.rehearse.findings.kind import Finding, Kind
from lockstep.tools.rehearse.line import Site
from lockstep.tools.rehearse.record import Job
from lockstep.tools.rehearse.source import argument_at, assigned_values, assignments_at

__all__ = ["KINDS"]

_GLOBAL = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}
_LOCAL_NAME = re.compile(r"(^|[._])local_?rank$", re.IGNORECASE)
_CONVERSIONS = ("int", "str")


def _global_source(value: ast.expr | None) -> str:
    """How an expression gets a global rank, and does nothing else with it; empty if it does not."""
    if not isinstance(value, ast.Call | ast.Subscript):
        return ""
    if isinstance(value, ast.Subscript):
        key = value.slice
        is_environ = ast.unparse(value.value).endswith("environ")
        return str(key.value) if is_environ and isinstance(key, ast.Constant) and key.value in _GLOBAL else ""
    name = ast.unparse(value.func)
    if name in _CONVERSIONS and len(value.args) == 1:
        return _global_source(value.args[0])
    if name.endswith(("dist.get_rank", "distributed.get_rank")) or name in ("get_rank", "hvd.rank"):
        return f"{name}()" if not value.args and not value.keywords else ""
    if name.endswith(("environ.get", "getenv")) and value.args and isinstance(value.args[0], ast.Constant):
        return str(value.args[0].value) if value.args[0].value in _GLOBAL else ""
    return ""


def _named_local(job: Job) -> Iterator[Finding]:
    """`local_rank = int(os.environ["SLURM_PROCID"])`, on a line that was seen to read that variable."""
    for _, event in job.each("variable"):
        site = event.site
        if site is None or event.data["name"] not in _GLOBAL:
            continue
        for name, value in assignments_at(site.file, site.line):
            if _LOCAL_NAME.search(name) and _global_source(value) == event.data["name"]:
                what = f"{name} is taken from {event.data['name']}, which numbers the processes of all nodes"
                yield Finding("local-rank-from-global-rank", event.sites[:1], what)


def _chosen_device(job: Job) -> Iterator[Finding]:
    """`torch.cuda.set_device` of what is a global rank wherever it is assigned."""
    for _, event in job.each("device"):
        site = event.site
        if site is None:
            continue
        argument = argument_at(site.file, site.line, "set_device", "device", 0)
        if argument is None:
            continue
        source = _global_source(argument)
        if not source and isinstance(argument, ast.Name | ast.Attribute):
            sources = [_global_source(value) for value in assigned_values(site.file, ast.unparse(argument))]
            source = sources[0] if sources and all(sources) else ""
        if source:
            what = f"the device is chosen by {source}, which numbers the processes of all nodes"
            yield Finding("local-rank-from-global-rank", event.sites[:1], what)


def _local_from_global(job: Job) -> Iterator[Finding]:
    yield from _named_local(job)
    yield from _chosen_device(job)


def _wrong_slurm_world(job: Job) -> Iterator[Finding]:
    """Each Slurm task starts several ranks, and the number of tasks is given for the number of ranks."""
    tasks = {
        event.data["value"]
        for _, event in job.each("variable")
        if event.data["name"] in ("SLURM_NPROCS", "SLURM_NTASKS")
    }
    children = max((event.data["nprocs"] for _, event in job.each("spawn")), default=1)
    if children < 2 or len(tasks) != 1:
        return
    (number,) = tasks
    for _, event in job.each("init"):
        if event.data["world_size"] == number:
            what = (
                f"world_size is {number}, the number of Slurm tasks, but each task starts {children} ranks: there are "
                f"{int(number) * children}"
            )
            yield Finding("slurm-world-size", event.sites[:1], what)


def _shared_gpus(job: Job) -> Iterator[Finding]:
    """Ranks of one node whose model lies on one GPU, in a job over nccl."""
    users: dict[tuple[int, int], dict[int, tuple[Site, ...]]] = defaultdict(dict)
    for process, event in job.each("ddp"):
        if process.rank is not None and event.data["device"] is not None and event.data["backend"] == "nccl":
            users[job.node_of(process.rank), event.data["device"]].setdefault(process.rank, event.sites)
    for (_, device), by_rank in users.items():
        if len(by_rank) > 1:
            ranks = tuple(sorted(by_rank))
            what = f"ranks {', '.join(map(str, ranks))} of one node all have their model on cuda:{device}"
            yield Finding("shared-gpu", by_rank[ranks[0]], what, ranks)


KINDS = (
    Kind(
        "local-rank-from-global-rank",
        "the local rank is a global rank",
        "it works on one node; on the second, numbers go on where the first node's ended, and there is no such GPU",
        "take LOCAL_RANK (SLURM_LOCALID under srun, hvd.local_rank() with Horovod), or what lockstep.init() returns",
        _local_from_global,
    ),
    Kind(
        "slurm-world-size",
        "the number of Slurm tasks is not the number of ranks",
        "SLURM_NPROCS counts tasks; where a task starts a process for each of its GPUs, ranks beyond that number have "
        "no place in the group, and the job stops or waits for ever",
        "world_size = int(SLURM_NTASKS) * processes per task; or start one task per GPU and no processes of your own",
        _wrong_slurm_world,
    ),
    Kind(
        "shared-gpu",
        "several ranks on one GPU",
        "nccl refuses two ranks on one GPU; before that, its memory holds all their models",
        "call torch.cuda.set_device(local_rank) before anything touches CUDA, and use that device",
        _shared_gpus,
    ),
)
