"""`lockstep run --slurm`: writes a batch script for a cluster, and submits it.

The script requests nodes from Slurm and lets `srun` start one process per rank; `lockstep.init()` in each reads its
rank from Slurm's variables. Nothing of Lockstep runs between Slurm and the script, and the batch script is not kept in
a file: Slurm stores it (`scontrol write batch_script JOB`), and `--dry-run` prints it.

[Note: requeue] With `--requeue` Slurm signals the batch shell a minute before the time limit. The shell passes the
signal on to the ranks, which save and end if they check `World.should_stop`, and requeues the job when they have ended,
or after two thirds of the time to the limit. Slurm itself does so when a node fails, and the shell when ranks report by
their exit code (`EXIT_STOPPED`) that they were told to stop. The job then starts again from the beginning, with
SLURM_RESTART_COUNT one higher and its output appended to the same log. The script itself has to look for checkpoints. A
run that was complete when the signal came is started once more, and finds that it is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep import env
from lockstep.errors import LaunchError, SetupError
from lockstep.launch.config import check_target
from lockstep.launch.screen import say
from lockstep.rank_status import EXIT_STOPPED
from lockstep.topology.slurm import read_step

__all__ = ["BatchJob", "Submission", "add_arguments", "job_from", "submit", "warn_of_other_tasks"]

# Runs a script like plain python, after installing the shims. By name, because it is a layer above this package.
_SHIM_RUNNER = "lockstep.compat.script"
_REQUEUE_BEFORE_S = 60
_SIGNAL_OPTION = re.compile(r"--signal=\S*@(?P<seconds>\d+)")
_SUBMIT_TIMEOUT_S = 120.0

_REQUEUE_HEAD = """\
requeue() {{
    echo "lockstep: job $SLURM_JOB_ID goes back into the queue" >&2
    scontrol requeue "$SLURM_JOB_ID"
}}
stop() {{
    interrupted=yes
    [ -z "$timer" ] || return
    echo "lockstep: the time limit is near; the ranks are told to stop" >&2
    step="${{step:-$!}}"
    kill -USR1 "$step"
    (sleep {patience_s} > /dev/null 2>&1; requeue) &
    timer=$!
}}
step= timer=
trap stop USR1
"""

# Generated where the job runs, so that it is not in the script that Slurm stores; srun passes it on in the environment.
# How many hosts there are may depend on sbatch options that are unknown here.
_TOKEN_LINE = (
    '[ "${{SLURM_NNODES:-1}}" -le 1 ] || export LOCKSTEP_TOKEN='
    '"${{LOCKSTEP_TOKEN:-$({python} -c "import secrets; print(secrets.token_hex(32))")}}"\n'
)

# Since 22.05 srun does not inherit the number of cores from the job. Without it, it may use all of the job's cores.
_CORES_LINES = """\
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
"""

# `wait` returns early when the signal comes, with a code that is not the step's. If it comes before the first line,
# `$!` is the timer.
_REQUEUE_TAIL = """\
step="${{step:-$!}}"
while :; do
    interrupted=
    wait "$step"; code=$?
    if [ -n "$interrupted" ]; then continue; fi
    if [ -n "$timer" ]; then
        if kill "$timer" 2> /dev/null; then requeue; fi
    elif [ "$code" = {stopped} ]; then requeue; fi
    exit "$code"
done
"""


@dataclass(frozen=True)
class BatchJob:
    """What to run on a cluster, and what to request from Slurm.

    Attributes:
        target: path of a script, or name of a module.
        args: passed on unchanged.
        is_module: `target` is a module, run as `python -m` does.
        nodes: number of hosts.
        ntasks_per_node: number of ranks on each host; None for one per GPU, or one if no GPUs are requested.
        gpus_per_node: GPUs on each host, in Slurm's format ("4", "a100:4"); None for none.
        cpus_per_task: cores of each rank; None for Slurm's default.
        partition: partition of the cluster; None for Slurm's default.
        time: time limit in Slurm's format ("30", "2:00:00", "1-0"); None for Slurm's default.
        job_name: name of the job; None for the name of the script.
        output: file for the ranks' output, with Slurm's patterns (%j, %x); None for "%x-%j.out".
        requeue: see [Note: requeue].
        prefix: put the rank before every line.
        sbatch_args: additional options for sbatch, which override all others.
        python: interpreter that runs the target on every host.
        folder: working directory of the job.
        with_shims: make `import horovod` and `import apex` find Lockstep's shims if they are not installed, and change
            torch as required by an old script.
        compat: change torch for old scripts, even if the script does not look old.
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    nodes: int = 1
    ntasks_per_node: int | None = None
    gpus_per_node: str | None = None
    cpus_per_task: int | None = None
    partition: str | None = None
    time: str | None = None
    job_name: str | None = None
    output: str | None = None
    requeue: bool = False
    prefix: bool = True
    sbatch_args: tuple[str, ...] = ()
    python: str = sys.executable
    folder: str = "."
    with_shims: bool = False
    compat: bool = False

    @property
    def name(self) -> str:
        """Name of the job."""
        if self.job_name is not None:
            return self.job_name
        return self.target if self.is_module else os.path.splitext(os.path.basename(os.path.abspath(self.target)))[0]

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each host."""
        if self.ntasks_per_node is not None:
            return self.ntasks_per_node
        count = (self.gpus_per_node or "").rpartition(":")[2]
        return int(count) if count.isdecimal() and int(count) > 0 else 1

    @property
    def num_ranks(self) -> int:
        """Number of ranks over all hosts."""
        return self.nodes * self.ranks_per_node

    @property
    def log(self) -> str:
        """Absolute path of the log, with Slurm's patterns."""
        return os.path.join(os.path.abspath(self.folder), self.output if self.output is not None else "%x-%j.out")

    def check(self) -> None:
        """Reject invalid options before Slurm is called.

        Raises:
            LaunchError: names the option, its value and what is expected.
        """
        check_target(self.target, self.is_module)
        for name, number in (
            ("nodes", self.nodes),
            ("ntasks-per-node", self.ranks_per_node),
            ("cpus-per-task", self.cpus_per_task),
        ):
            if number is not None and number < 1:
                raise LaunchError(f"--{name} is {number}; expected at least 1")
        for option in (*self._options(), *self.sbatch_args):
            if not option.isprintable():
                raise LaunchError(f"{option!r} cannot be in a line of a batch script")
        for option in self.sbatch_args:
            if not option.startswith("-"):
                raise LaunchError(
                    f"--sbatch-arg is {option!r}; expected an option of sbatch, as in --sbatch-arg=--mem=8G"
                )

    def script(self) -> str:
        """The batch script."""
        directives = "".join(
            f"#SBATCH {_quote_directive(option)}\n" for option in (*self._options(), *self.sbatch_args)
        )
        token = _TOKEN_LINE.format(python=shlex.quote(self.python))
        head = f"#!/bin/bash\n# {self.num_ranks} ranks of {self.target!r}\n{directives}\n{_CORES_LINES}{token}"
        step = shlex.join(self._step())
        if self.requeue:
            patience_s = self._requeue_before_s() * 2 // 3
            return (
                f"{head}{_REQUEUE_HEAD.format(patience_s=patience_s)}{step} &\n"
                f"{_REQUEUE_TAIL.format(stopped=EXIT_STOPPED)}"
            )
        return f"{head}exec {step}\n"

    def _requeue_before_s(self) -> int:
        """Seconds from the signal to the time limit: those of the last `--signal` in `sbatch_args`, or ours."""
        found = [_SIGNAL_OPTION.fullmatch(option) for option in self.sbatch_args]
        given = [int(match["seconds"]) for match in found if match is not None]
        return given[-1] if given else _REQUEUE_BEFORE_S

    def arguments(self) -> list[str]:
        """The options in the script, also as arguments: sbatch's environment variables override its script."""
        is_default = {"--chdir": True, "--job-name": self.job_name is None, "--output": self.output is None}
        own = [option for option in self._options() if not is_default.get(option.partition("=")[0], False)]
        return [*own, *self.sbatch_args]

    def _options(self) -> list[str]:
        """Options of sbatch, except for `sbatch_args`, which come after them: the last one of a name counts."""
        chosen: list[tuple[str, object]] = [
            ("job-name", self.name),
            ("partition", self.partition),
            ("nodes", self.nodes),
            ("ntasks-per-node", self.ranks_per_node),
            ("gpus-per-node", self.gpus_per_node),
            ("cpus-per-task", self.cpus_per_task),
            ("time", self.time),
            ("chdir", os.path.abspath(self.folder)),
            ("output", self.log),
        ]
        options = [f"--{name}={value}" for name, value in chosen if value is not None]
        if self.requeue:
            options += ["--requeue", "--open-mode=append", f"--signal=B:USR1@{_REQUEUE_BEFORE_S}"]
        return options

    def _step(self) -> list[str]:
        """The command that starts the ranks."""
        # Otherwise ranks that wait for one that died would keep waiting until the time limit.
        srun = ["srun", "--kill-on-bad-exit=1"]
        if self.prefix:
            srun.append("--label")
        shims = ["-m", _SHIM_RUNNER, *(["--compat"] if self.compat else [])] if self.with_shims else []
        return [*srun, self.python, "-u", *shims, *(["-m"] if self.is_module else []), self.target, *self.args]


@dataclass(frozen=True)
class Submission:
    """A job in Slurm's queue.

    Attributes:
        job_id: number of the job.
        log: path of its output. Patterns that depend on more than the job are not expanded.
    """

    job_id: str
    log: str


def submit(job: BatchJob) -> Submission:
    """Submit a job to Slurm.

    Raises:
        LaunchError: an option is invalid, sbatch is missing, or Slurm refuses the job; says why.
    """
    job.check()
    folder = os.path.dirname(job.log)
    if "%" not in folder:
        # Slurm does not create the folder, and without it the job fails silently.
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"cannot make {folder}, where the log is to be ({error.strerror})") from error
    said = _sbatch(job)
    # With several clusters: "42;cluster".
    job_id = said.strip().partition(";")[0]
    if not job_id.isdigit():
        raise LaunchError(f"sbatch printed no job number, but {said.strip()!r}")
    patterns = {"%%": "%", "%j": job_id, "%A": job_id, "%x": job.name}
    return Submission(job_id, _expand(job.log, patterns))


def _sbatch(job: BatchJob) -> str:
    """Call sbatch for a job; returns its output."""
    command = ["sbatch", "--parsable", *job.arguments()]
    try:
        done = subprocess.run(command, input=job.script(), capture_output=True, text=True, timeout=_SUBMIT_TIMEOUT_S)
    except FileNotFoundError:
        raise LaunchError(
            "sbatch is not installed here, or not on PATH: submit from a login node of the cluster, or print the batch "
            "script with --dry-run"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"sbatch does not work: {error}") from error
    if done.returncode != 0:
        reason = "; ".join(line.removeprefix("sbatch: ") for line in done.stderr.strip().splitlines())
        raise LaunchError(f"Slurm refuses the job: {reason or f'sbatch ended with {done.returncode}'}")
    return done.stdout


def _quote_directive(option: str) -> str:
    """Quote an option for a line of sbatch's script: quotes and backslashes, but no variables."""
    if not any(character in option for character in " \t\"'\\#"):
        return option
    return '"' + option.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _expand(text: str, patterns: dict[str, str]) -> str:
    """Expand Slurm's file name patterns, from left to right."""
    parts, position = [], 0
    while position < len(text):
        pattern = text[position : position + 2]
        parts.append(patterns.get(pattern, text[position]))
        position += 2 if pattern in patterns else 1
    return "".join(parts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lockstep run --slurm` to a parser."""
    parser.add_argument("--slurm", action="store_true", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true", help="print the batch script, submit nothing")
    shims = parser.add_mutually_exclusive_group()
    shims.add_argument("--compat", action="store_true", help="as with `lockstep run`")
    shims.add_argument("--no-compat", dest="with_shims", action="store_false", help="as with `lockstep run`")
    parser.add_argument(
        "-m", "--module", dest="is_module", action="store_true", help="run a module, as `python -m` does"
    )
    parser.add_argument("--nodes", type=int, metavar="N", default=1, help="hosts (default: %(default)s)")
    parser.add_argument(
        "--ntasks-per-node",
        "--nproc",
        "--nproc-per-node",
        "--nproc_per_node",
        dest="ntasks_per_node",
        type=int,
        metavar="K",
        help="ranks on each host (default: one per GPU asked for, else 1)",
    )
    parser.add_argument("--gpus-per-node", metavar="G", help="GPUs of each host, such as 4 or a100:4")
    parser.add_argument("--cpus-per-task", type=int, metavar="C", help="cores of each rank")
    parser.add_argument("--partition", metavar="NAME", help="partition of the cluster")
    parser.add_argument("--time", metavar="LIMIT", help="time limit, such as 30 (minutes), 2:00:00 or 1-12:00:00")
    parser.add_argument("--job-name", metavar="NAME", help="default: the name of the script")
    parser.add_argument(
        "--output", metavar="FILE", help="log of all ranks, with Slurm's patterns (default: %%x-%%j.out)"
    )
    parser.add_argument(
        "--requeue",
        action="store_true",
        help=f"restart the job when a host fails, and {_REQUEUE_BEFORE_S} s before its time limit; the script resumes "
        "from what it has saved",
    )
    parser.add_argument(
        "--no-prefix", dest="prefix", action="store_false", help="do not prefix each line with the rank"
    )
    parser.add_argument(
        "--sbatch-arg",
        dest="sbatch_args",
        action="append",
        metavar="OPTION",
        default=[],
        help="one more option for sbatch, as in --sbatch-arg=--mem=64G; may be repeated",
    )


def job_from(options: argparse.Namespace, target: str, args: Sequence[str]) -> BatchJob:
    """The job described by the options of `add_arguments`."""
    values = {name: value for name, value in vars(options).items() if name not in ("slurm", "dry_run")}
    values["sbatch_args"] = tuple(values["sbatch_args"])
    return BatchJob(target=target, args=tuple(args), **values)


def warn_of_other_tasks() -> None:
    """Warn, in the first of several tasks of a step, that launchers that each start a job do not form one job."""
    step = None
    with contextlib.suppress(SetupError):  # errors in Slurm's variables do not matter to a job on one host
        step = read_step(env.snapshot())
    if step is not None and step.num_tasks > 1 and step.rank == 0:
        say(
            f"lockstep: warning: srun started {step.num_tasks} launchers here, and each starts its own separate "
            "ranks; for one job let srun start the script itself: srun python script.py\n"
        )
