"""Scripts that work only as the rehearsal starts them, and not with other launchers."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.compat.legacy.sources import parse
from lockstep.tools.rehearse.events import RehearsedJob
from lockstep.tools.rehearse.findings.finding import Finding, Kind

__all__ = ["KINDS"]

_LOCAL_VARIABLES = frozenset({"LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"})
_ATTRIBUTE = "local_rank"


def _never_joined(job: RehearsedJob) -> Iterator[Finding]:
    """Every process trains, none joined a group, and none read its rank."""
    if job.num_started < 2 or job.has_group:
        return
    knows = any(event.data["asks"] for _, event in job.each("variable")) or any(job.each("spawn"))
    if knows or any(event.data["modules"] for _, event in job.each("peers")):
        return
    trainings = {process.rank: event for process, event in job.each("optimizer") if event.data["steps"]}
    if len(trainings) == job.num_started:
        event = next(iter(trainings.values()))
        what = f"{job.num_started} processes were started, and each trained its own model: none joined a group"
        yield Finding("never-joined", event.sites, what)


def _reads_attribute(file: str) -> bool:
    """Whether the text reads an attribute `local_rank`, as argparse sets for the option."""
    tree = parse(file)
    return tree is not None and any(
        isinstance(node, ast.Attribute) and node.attr == _ATTRIBUTE and isinstance(node.ctx, ast.Load)
        for node in ast.walk(tree)
    )


def _option_of_old_launchers(job: RehearsedJob) -> Iterator[Finding]:
    """The script takes its local rank only from an option, which the rehearsal passed."""
    if not job.settings.local_rank_option:
        return
    if any(event.data["asks"] and event.data["name"] in _LOCAL_VARIABLES for _, event in job.each("variable")):
        return
    for process, event in job.each("option"):
        if process.joined and event.site is not None and _reads_attribute(event.site.file):
            name = event.data["name"]
            what = f"the local rank comes from {name}, and nothing reads LOCAL_RANK from the environment"
            yield Finding("local-rank-option", event.sites, what)


def _older_torch(job: RehearsedJob) -> Iterator[Finding]:
    """A call succeeded only because Lockstep changed torch for the script."""
    for _, event in job.each("older"):
        yield Finding("needs-older-torch", event.sites, event.data["error"])


KINDS = (
    Kind(
        "never-joined",
        "ranks that joined no group",
        "each trains independently: N times the same work instead of one training N times as fast, and which "
        "checkpoint is left in the end is chance",
        "call lockstep.init() or torch.distributed.init_process_group on every rank, wrap the model in "
        "DistributedDataParallel and give each rank a share of the data; or start one process",
        _never_joined,
    ),
    Kind(
        "local-rank-option",
        "torchrun passes no --local_rank",
        "torchrun and srun set the local rank only in the environment, and torch.distributed.launch passes "
        "--local-rank since torch 2.0: the option keeps its default on every rank, or the parser rejects the other "
        "spelling",
        'read int(os.environ["LOCAL_RANK"]), perhaps as the default of the option; lockstep launch passes what a '
        "script declares",
        _option_of_old_launchers,
    ),
    Kind(
        "needs-older-torch",
        "plain torch rejects this call",
        "it worked because Lockstep changes torch for scripts of 2018 to 2021; under torchrun or python it raises",
        "write it for today's torch (.reshape(-1) after eq, int(batch_size / n), no verbose=, no argument to "
        "Sampler.__init__, gloo for tcp); or start it with lockstep run or lockstep launch, which make the same change",
        _older_torch,
    ),
)
