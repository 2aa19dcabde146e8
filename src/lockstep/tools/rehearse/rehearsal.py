"""Runs one rehearsal, from the command line to the report. Never imports torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep import env
from lockstep.compat.legacy.choice import tell_ranks
from lockstep.compat.legacy.sources import locate_target
from lockstep.errors import LaunchError
from lockstep.launch.config import LaunchConfig, check_target
from lockstep.launch.environment import without_launcher
from lockstep.launch.screen import say
from lockstep.launch.supervisor import launch_job
from lockstep.tools.rehearse.events import RehearsedJob, read_records
from lockstep.tools.rehearse.findings import KINDS, Finding, judge
from lockstep.tools.rehearse.plan import Needs, option_for_local_rank, read_script
from lockstep.tools.rehearse.report import format_json, format_text
from lockstep.tools.rehearse.settings import RehearsalSettings, parse_memory

__all__ = ["Rehearsal", "rehearse"]

_RANK_MODULE = "lockstep.tools.rehearse.rank"


@dataclass(frozen=True)
class Rehearsal:
    """What to rehearse, and how to report.

    Attributes:
        target: path of a script, or name of a module.
        args: arguments of the script, passed on unchanged.
        nproc: ranks on each node.
        gpus: simulated GPUs per node; None for one per rank.
        nodes: number of nodes to simulate.
        start: "ranks", `nproc` processes per node; "once", one per node; "auto", determined from the script's text.
        memory: memory of each GPU, such as "8GiB"; None for no limit.
        format: format of the report, "text" or "json".
        output: file for the report; None for stdout.
        strict: whether to exit with 1 if there are findings.
        is_module: whether `target` is a module.
        prefix: whether to put `[rank] ` before every line that a rank prints.
        with_shims: whether scripts for Horovod, Apex and old releases of torch get Lockstep's shims.
        grace_s: seconds from asking a rank to stop to SIGKILL.
        stop_grace_s: the same for ranks that save before they stop.
    """

    target: str
    args: Sequence[str] = ()
    nproc: int = 2
    gpus: int | None = None
    nodes: int = 1
    start: str = "auto"
    memory: str | None = None
    format: str = "text"
    output: str | None = None
    strict: bool = False
    is_module: bool = False
    prefix: bool = True
    with_shims: bool = True
    grace_s: float = 5.0
    stop_grace_s: float = 30.0


def _settings(rehearsal: Rehearsal, needs: Needs) -> RehearsalSettings:
    once = needs.is_one_process if rehearsal.start == "auto" else rehearsal.start == "once"
    return RehearsalSettings(
        devices=rehearsal.nproc if rehearsal.gpus is None else rehearsal.gpus,
        nodes=rehearsal.nodes,
        processes_per_node=1 if once else rehearsal.nproc,
        plain=without_launcher(env.snapshot()) if once and rehearsal.nodes == 1 else {},
        memory_bytes=0 if rehearsal.memory is None else parse_memory(rehearsal.memory),
        slurm=needs.reads_slurm,
        horovod=needs.uses_horovod and rehearsal.with_shims and importlib.util.find_spec("horovod") is None,
        local_rank_option="" if once else option_for_local_rank(needs, rehearsal.target, rehearsal.is_module),
    )


def rehearse(rehearsal: Rehearsal) -> int:
    """Run the script, and write the report. Local.

    Returns:
        The exit code: that of the job if it is not 0; 1 if a finding is a failure of the script, or with `strict` if
        there are any findings; else 0.

    Raises:
        LaunchError: the job cannot be started, and nothing was; or the report cannot be written.
    """
    check_target(rehearsal.target, rehearsal.is_module)
    source = locate_target(rehearsal.target, rehearsal.is_module)
    needs = Needs() if source is None else read_script(source.file)
    settings = _settings(rehearsal, needs)
    variables = env.snapshot()
    env.LOCKSTEP_REHEARSAL.set(settings.dump(), variables)
    # Real GPUs stay hidden.
    env.CUDA_VISIBLE_DEVICES.set("", variables)
    asked = None if rehearsal.with_shims else False
    tell_ranks(variables, asked, rehearsal.target, rehearsal.is_module, rehearsal.args)
    jobs: list[RehearsedJob] = []
    code = launch_job(
        LaunchConfig(
            target=_RANK_MODULE,
            args=(*(("-m",) if rehearsal.is_module else ()), rehearsal.target, *rehearsal.args),
            nproc=settings.nodes * settings.processes_per_node,
            is_module=True,
            prefix=rehearsal.prefix,
            grace_s=rehearsal.grace_s,
            stop_grace_s=rehearsal.stop_grace_s,
            environment=variables,
            on_end=lambda folder: jobs.append(read_records(folder, settings)),
            warns_unjoined=False,
        )
    )
    findings = judge(jobs[-1]) if jobs else []
    _write(rehearsal, findings, jobs[-1] if jobs else None, code)
    has_failed = any(KINDS[one.id].is_failure for one in findings)
    return code if code != 0 else int(has_failed or (rehearsal.strict and bool(findings)))


def _write(rehearsal: Rehearsal, findings: Sequence[Finding], job: RehearsedJob | None, code: int) -> None:
    make = format_json if rehearsal.format == "json" else format_text
    text = make(rehearsal.target, findings, job, code)
    if rehearsal.output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(rehearsal.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"the report cannot be written to {rehearsal.output!r}: {error}") from error
    count = f"{len(findings)} finding{'' if len(findings) == 1 else 's'}" if findings else "nothing found"
    say(f"lockstep: {count}; the report is in {rehearsal.output}\n")
