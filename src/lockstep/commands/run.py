"""`lockstep run`: starts N processes of any script, on this host or as a Slurm job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lockstep import env
from lockstep.commands.parsing import Parser, add_grace, add_nproc, hint_of_misplaced, split_at_script
from lockstep.commands.verify_hint import mention_verify
from lockstep.compat.legacy import choice
from lockstep.launch import slurm
from lockstep.launch.config import LaunchConfig, resolve_nproc
from lockstep.launch.environment import visible_gpus
from lockstep.launch.hosts.options import add_arguments, hosts_from
from lockstep.launch.hosts.start import start_on_hosts
from lockstep.launch.mpi import is_rank_of_mpirun, run_as_rank
from lockstep.launch.screen import say
from lockstep.launch.supervisor import launch_job

__all__ = ["main"]

# Options without a value; all others take one.
_FLAGS = frozenset(
    {
        "-m",
        "--module",
        "--no-prefix",
        "--all-bars",
        "-h",
        "--help",
        "--standalone",
        "--slurm",
        "--dry-run",
        "--requeue",
        "--stacks-on-timeout",
        "--compat",
        "--no-compat",
    }
)

_RUN_DESCRIPTION = """\
Start N processes of a script on this host. Each gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT and the other variables that torchrun sets, so a script written for torchrun runs unchanged.
Options after the script belong to the script.
"""

_RUN_EPILOG = """\
When a rank fails, the others are stopped, the first failure is printed last with its traceback, and the exit code is
that rank's (128 + signal if one killed it). Ctrl-C stops all ranks; a second Ctrl-C kills them. No process is left
behind, even if this one is killed. SIGUSR1 to this process prints where every rank is, and the job continues.

examples:
  lockstep run --nproc 4 train.py --epochs 10
  lockstep run --nproc auto -m mypackage.train
  lockstep run --nproc 2 --log-dir logs --max-restarts 3 train.py

on a cluster: lockstep run --slurm --nodes 2 --ntasks-per-node 4 train.py; see lockstep run --slurm --help
"""

_SLURM_DESCRIPTION = """\
Run a script on the nodes of a Slurm cluster: write a batch script, submit it, and print where the log will be.
Options after the script belong to the script.
"""

_SLURM_EPILOG = """\
examples:
  lockstep run --slurm --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 --time 2:00:00 train.py --epochs 10
  lockstep run --slurm --nodes 2 --requeue --sbatch-arg=--mem=64G --dry-run -m mypackage.train
"""


def _make_run_parser() -> Parser:
    parser = Parser(
        prog="lockstep run",
        usage="lockstep run [options] script.py [args ...]\n       lockstep run [options] -m module [args ...]",
        description=_RUN_DESCRIPTION,
        epilog=_RUN_EPILOG,
    )
    add_nproc(parser)
    parser.add_argument(
        "-m", "--module", dest="is_module", action="store_true", help="run a module, as `python -m` does"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--no-prefix",
        dest="prefix",
        action="store_false",
        help="let ranks write to the terminal directly, without `[rank]` before each line",
    )
    parser.add_argument(
        "--all-bars",
        action="store_true",
        help="on a terminal, show the progress bars of all ranks, not only rank 0's",
    )
    output.add_argument("--log-dir", metavar="DIR", help="write the output to DIR/rank<r>.log, one file per rank")
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="K",
        help="after a failure, restart all ranks, up to K times (default: 0; 3 if --nnodes is MIN:MAX)",
    )
    add_grace(parser)
    choice.add_arguments(parser)
    parser.add_argument(
        "--stacks-on-timeout",
        action="store_true",
        help="when a collective times out, print the stacks of all ranks (needs py-spy)",
    )
    parser.add_argument(
        "--master-addr",
        "--master_addr",
        metavar="ADDR",
        help=f"MASTER_ADDR, for scripts that use torch's env:// (default: {LaunchConfig.master_addr})",
    )
    parser.add_argument(
        "--master-port",
        "--master_port",
        type=int,
        metavar="PORT",
        help="MASTER_PORT, for scripts that use torch's env:// (default: a free one)",
    )
    add_arguments(
        parser.add_argument_group(
            "several hosts", "--master-addr and --master-port are then where the launchers meet, on host number 0"
        )
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: the words after `lockstep run`.

    Returns:
        The exit code of the job.
    """
    options, script, script_arguments = split_at_script(arguments, _FLAGS)
    if "--slurm" in options:
        return _run_on_slurm(options, script, script_arguments)
    parser = _make_run_parser()
    chosen = parser.parse_args(options)
    if script is None:
        parser.error("name a module to run after -m" if chosen.is_module else "name a script to run")
    hosts = hosts_from(chosen)
    if hosts is None and is_rank_of_mpirun(env.snapshot()):
        return _run_as_rank_of_mpirun(parser, chosen, script, script_arguments)
    given = {name: value for name, value in vars(chosen).items() if value is not None}
    given["environment"] = variables = env.snapshot()
    choice.tell_ranks(variables, given.pop("compat", None), script, chosen.is_module, script_arguments)
    if hosts is not None:
        return start_on_hosts(LaunchConfig(target=script, args=script_arguments, **given), hosts)
    slurm.warn_of_other_tasks()
    config = LaunchConfig(target=script, args=script_arguments, **given)
    config.check()
    if not str(config.nproc).isdigit():
        _announce_number(config)
    code = launch_job(config)
    if code == 0:
        mention_verify(config)
    return code


def _announce_number(config: LaunchConfig) -> None:
    """Print the number of ranks if none was given, and a hint if it was given in the wrong place."""
    variables = config.environment or {}
    number = resolve_nproc(config.nproc, variables)
    each = "GPU" if config.nproc != "cpu" and visible_gpus(variables) > 0 else "core"
    say(f"lockstep: {number} {'rank' if number == 1 else 'ranks'}, one per {each}; set another number with --nproc N\n")
    say(hint_of_misplaced("lockstep run", (*(["-m"] if config.is_module else []), config.target), config.args))


def _run_as_rank_of_mpirun(
    parser: Parser, chosen: argparse.Namespace, script: str, script_arguments: Sequence[str]
) -> int:
    names = ("nproc", "log_dir", "max_restarts", "master_addr", "master_port")
    given = {f"--{name.replace('_', '-')}" for name in names if getattr(chosen, name) != parser.get_default(name)}
    if chosen.compat is not None:
        env.LOCKSTEP_COMPAT.set(chosen.compat)
    return run_as_rank(script, script_arguments, is_module=chosen.is_module, given=given)


def _run_on_slurm(options: Sequence[str], script: str | None, script_arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="lockstep run --slurm",
        usage="lockstep run --slurm [options] script.py [args ...]\n"
        "       lockstep run --slurm [options] -m module [args ...]",
        description=_SLURM_DESCRIPTION,
        epilog=_SLURM_EPILOG,
    )
    slurm.add_arguments(parser)
    chosen = parser.parse_args(options)
    if script is None:
        parser.error("name a module to run after -m" if chosen.is_module else "name a script to run")
    job = slurm.job_from(chosen, script, script_arguments)
    if chosen.dry_run:
        job.check()
        print(job.script(), end="")
        return 0
    submission = slurm.submit(job)
    print(f"job {submission.job_id}: {job.num_ranks} {'rank' if job.num_ranks == 1 else 'ranks'} of {script}")
    print(f"log: {submission.log}")
    return 0
