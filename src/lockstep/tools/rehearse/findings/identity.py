"""Ranks, local ranks and world sizes that are taken from the wrong source."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator

from lockstep.tools.rehearse.events import Process, RehearsedJob
from lockstep.tools.rehearse.findings.finding import Finding, Kind
from lockstep.tools.rehearse.line import Site
from lockstep.tools.rehearse.source import argument_at, assigned_values, assignments_at, divisors_at, is_factor

__all__ = ["KINDS"]

_GLOBAL = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}
_LOCAL_NAME = re.compile(r"(^|[._])local_?rank$", re.IGNORECASE)
_WORLD_NAME = re.compile(r"(^|[._])(world_?size|num_replicas)$", re.IGNORECASE)
_CONVERSIONS = ("int", "str")
_MAX_NAMES = 4  # one assigned to the next
_DEVICE_SETTERS = ("set_device", "set_device_index", "set_device_idx")


def _global_source(value: ast.expr | None, file: str) -> str:
    """The variable or call from which an expression takes a global rank unchanged; empty if it does not."""
    if isinstance(value, ast.Subscript):
        return _global_variable(value.slice) if _is_environment(ast.unparse(value.value), file) else ""
    if not isinstance(value, ast.Call):
        return ""
    name = ast.unparse(value.func)
    if name in _CONVERSIONS and len(value.args) == 1:
        return _global_source(value.args[0], file)
    if name.endswith(("dist.get_rank", "distributed.get_rank")) or name in ("get_rank", "hvd.rank"):
        return f"{name}()" if not value.args and not value.keywords else ""
    if name.endswith(("environ.get", "getenv")) and value.args:
        return _global_variable(value.args[0])
    return ""


def _is_environment(name: str, file: str) -> bool:
    """Whether it is `os.environ`, or a name that the file only assigns from it."""
    made_of = [each is not None and "os.environ" in ast.unparse(each) for each in assigned_values(file, name)]
    return name.endswith("environ") or (bool(made_of) and all(made_of))


def _global_variable(name: ast.expr) -> str:
    """The variable named by a literal, if it holds a global rank; empty otherwise."""
    return str(name.value) if isinstance(name, ast.Constant) and name.value in _GLOBAL else ""


def _numbers_tasks(job: RehearsedJob, process: Process) -> bool:
    """Whether a global rank numbers nodes: if there is one process per node, which starts the node's ranks."""
    starts_ranks = process.family != "" or any(process.of("spawn"))
    return job.settings.processes_per_node == 1 and starts_ranks


def _named_local(job: RehearsedJob) -> Iterator[Finding]:
    """`local_rank = int(os.environ["SLURM_PROCID"])`, on a line that read that variable.

    A script that computes with the number, as in `local_rank * gpus + gpu`, does not use it as a local rank.
    """
    for process, event in job.each("variable"):
        site = event.site
        if site is None or event.data["name"] not in _GLOBAL or not event.data["value"]:
            continue
        if _numbers_tasks(job, process):
            continue
        for name, value in assignments_at(site.file, site.line):
            is_taken = _LOCAL_NAME.search(name) and _global_source(value, site.file) == event.data["name"]
            if is_taken and not is_factor(site.file, name):
                what = f"{name} is taken from {event.data['name']}, which numbers the processes of all nodes"
                yield Finding("local-rank-from-global-rank", event.sites[:1], what)


def _resolve(file: str, value: ast.expr | None, source_of: Callable[[ast.expr | None], str], depth: int = 0) -> str:
    """The source of an expression, or, for a name, that of everything assigned to it; empty if there is none."""
    source = source_of(value)
    if not source and isinstance(value, ast.Name | ast.Attribute) and depth < _MAX_NAMES:
        sources = [_resolve(file, each, source_of, depth + 1) for each in assigned_values(file, ast.unparse(value))]
        source = sources[0] if sources and all(sources) else ""
    return source


def _chosen_device(job: RehearsedJob) -> Iterator[Finding]:
    """`torch.cuda.set_device` with a value that is only ever assigned a global rank."""
    for process, event in job.each("device"):
        site = event.site
        if site is None:
            continue
        arguments = [argument_at(site.file, site.line, name, "device", 0) for name in _DEVICE_SETTERS]
        argument = next((each for each in arguments if each is not None), None)
        source = _resolve(site.file, argument, functools.partial(_global_source, file=site.file))
        if source and not (source in _GLOBAL and _numbers_tasks(job, process)):
            what = f"the device is chosen by {source}, which numbers the processes of all nodes"
            yield Finding("local-rank-from-global-rank", event.sites[:1], what)


def _local_from_global(job: RehearsedJob) -> Iterator[Finding]:
    yield from _named_local(job)
    yield from _chosen_device(job)


def _count_source(value: ast.expr | None) -> str:
    """The text of a call of `device_count()` of any module; empty for anything else."""
    if not isinstance(value, ast.Call):
        return ""
    name = ast.unparse(value.func)
    if name in _CONVERSIONS and len(value.args) == 1:
        return _count_source(value.args[0])
    return f"{name}()" if name.rpartition(".")[2] == "device_count" and not value.args else ""


def _counted_world(job: RehearsedJob) -> Iterator[Finding]:
    """The number of a node's GPUs is used as the number of ranks.

    That is wrong if there are more ranks than GPUs on a node, or if a launcher could start the script on two nodes.
    """
    for process in job.processes:
        is_more = process.joined and process.world_size > job.settings.devices
        if not is_more and not job.is_launched(process):
            continue
        for site, name, value in _world_sizes(process):
            source = _resolve(site.file, value, _count_source)
            if source:
                what = f"{name} is {source}, which counts the GPUs of one node"
                yield Finding("world-size-from-device-count", (site,), what)


def _world_sizes(process: Process) -> Iterator[tuple[Site, str, ast.expr | None]]:
    """For each line that ran and sets or uses a world size: the line, the name it goes by there, and its expression."""
    for event in process.of("count"):
        assert event.site is not None
        for name, value in assignments_at(event.site.file, event.site.line):
            assigned = assigned_values(event.site.file, name)
            if _WORLD_NAME.search(name) and all(map(_count_source, assigned)):
                yield event.site, name, value
    for event in process.of("init"):
        yield from _world_argument(event.site, "init_process_group", "world_size", 3)
    for event in process.of("pass"):
        maker = Site.load(event.data["sampler"][0]) if event.data["sampler"] else None
        yield from _world_argument(maker, "DistributedSampler", "num_replicas", 1)
    for event in process.of("reduced"):
        for site in map(Site.load, event.data["divided_at"]):
            for divisor in divisors_at(site.file, site.line):
                yield site, "the divisor of a sum over ranks", divisor


def _world_argument(
    site: Site | None, function: str, name: str, position: int
) -> Iterator[tuple[Site, str, ast.expr | None]]:
    """An argument of a call, unless it is a name such as `world_size`, which is found where it is assigned."""
    argument = None if site is None else argument_at(site.file, site.line, function, name, position)
    if site is not None and argument is not None and not _WORLD_NAME.search(ast.unparse(argument)):
        yield site, name, argument


def _wrong_slurm_world(job: RehearsedJob) -> Iterator[Finding]:
    """Each Slurm task starts several ranks, but the number of tasks is used as the world size."""
    tasks = {
        event.data["value"]
        for _, event in job.each("variable")
        if event.data["name"] in ("SLURM_NPROCS", "SLURM_NTASKS") and event.data["value"]
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


def _shared_gpus(job: RehearsedJob) -> Iterator[Finding]:
    """Ranks of one node whose models are on the same GPU, in a job that uses nccl."""
    users: dict[tuple[int, int], dict[int, tuple[Site, ...]]] = defaultdict(dict)
    for process, event in job.each("ddp"):
        if process.rank is not None and event.data["device"] is not None and event.data["backend"] == "nccl":
            users[job.node_of(process.rank), event.data["device"]].setdefault(process.rank, event.sites)
    for (_, device), by_rank in users.items():
        if len(by_rank) > 1:
            ranks = tuple(sorted(by_rank))
            what = f"ranks {', '.join(map(str, ranks))} of one node all have their model on GPU {device}"
            yield Finding("shared-gpu", by_rank[ranks[0]], what, ranks)


KINDS = (
    Kind(
        "local-rank-from-global-rank",
        "the local rank is a global rank",
        "it works on one node; on the second, numbers continue after the first node's, and there is no such GPU",
        "use LOCAL_RANK (SLURM_LOCALID under srun, hvd.local_rank() with Horovod), or the result of lockstep.init()",
        _local_from_global,
    ),
    Kind(
        "world-size-from-device-count",
        "the number of this node's GPUs is used as the world size",
        "it is right on one node; on two, half of the ranks are missing in the group or the sampler, and means are "
        "divided by too little",
        'use dist.get_world_size(), or int(os.environ["WORLD_SIZE"]) before there is a group',
        _counted_world,
    ),
    Kind(
        "slurm-world-size",
        "the number of Slurm tasks is not the number of ranks",
        "SLURM_NPROCS counts tasks; if a task starts a process for each of its GPUs, ranks beyond that number cannot "
        "join the group, and the job stops or waits forever",
        "world_size = int(SLURM_NTASKS) * processes per task; or start one task per GPU and no processes of your own",
        _wrong_slurm_world,
    ),
    Kind(
        "shared-gpu",
        "several ranks on one GPU",
        "nccl refuses two ranks on one GPU; even before, its memory holds all their models",
        "call torch.cuda.set_device(local_rank) before anything uses CUDA, and use that device",
        _shared_gpus,
    ),
)
