"""The `lockstep` command: `run` starts any script on N processes, `train` a recipe that comes with Lockstep.

Plain argparse and no torch, so that the ranks start at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import lockstep
from lockstep.errors import LaunchError, SetupError
from lockstep.launch import slurm
from lockstep.launch.config import LaunchConfig
from lockstep.launch.output import say
from lockstep.launch.supervisor import launch_job

__all__ = ["main"]

_USAGE_CODE = 2
_INTERRUPTED_CODE = 130

# Options of `run` that stand alone; all others take a value. Needed to find where the script begins,
# which argparse itself gets wrong once the script has options or a `--` of its own.
_RUN_FLAGS = frozenset({"-m", "--module", "--no-prefix", "-h", "--help", "--slurm", "--dry-run", "--requeue"})

_RECIPES = {"digits": "lockstep.recipes.digits"}

_OVERVIEW = """\
usage: lockstep <command> ...

Synchronous data-parallel training: N processes, one answer.

commands:
  run      start N processes of any script:    lockstep run --nproc 2 train.py --lr 0.1
  train    train a recipe that comes with it:  lockstep train digits --nproc 2

options:
  -h, --help   show this help; `lockstep <command> --help` shows a command's own
  --version    show the version
"""

_RUN_DESCRIPTION = """\
Start N processes of a script on this host. Each gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT and the other variables that torchrun sets, so a script written for torchrun runs unchanged.
Options after the script belong to the script.
"""

_RUN_EPILOG = """\
When a rank fails, the others are stopped, the first failure is shown last with its traceback, and the exit code is that
rank's (128 + signal if one killed it). Ctrl-C ends all ranks, a second Ctrl-C at once. No process survives, also
when this one is killed.

examples:
  lockstep run --nproc 4 train.py --epochs 10
  lockstep run --nproc auto -m mypackage.train
  lockstep run --nproc 2 --log-dir logs --max-restarts 3 train.py

on a cluster: lockstep run --slurm --nodes 2 --ntasks-per-node 4 train.py; see lockstep run --slurm --help
"""

_SLURM_DESCRIPTION = """\
Run a script on the nodes of a Slurm cluster: write a batch script, submit it, and say where the log will be.
Options after the script belong to the script.
"""

_SLURM_EPILOG = """\
examples:
  lockstep run --slurm --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 --time 2:00:00 train.py --epochs 10
  lockstep run --slurm --nodes 2 --requeue --sbatch-arg=--mem=64G --dry-run -m mypackage.train
"""

_TRAIN_OVERVIEW = """\
usage: lockstep train <recipe> [options]

recipes: {recipes}

`lockstep train <recipe> --help` shows its options
"""


class _Parser(argparse.ArgumentParser):
    """Errors in one line, through the same door as all others."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}; see `{self.prog} --help`")


def _add_nproc(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--nproc",
        "--nproc-per-node",
        "--nproc_per_node",
        dest="nproc",
        metavar="N",
        default="auto",
        help="number of processes; auto (default): one per GPU, or one per core where there is no GPU",
    )


def _add_grace(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--grace",
        dest="grace_s",
        type=float,
        metavar="SECONDS",
        default=LaunchConfig.grace_s,
        help="time from asking a rank to stop (SIGTERM) to SIGKILL (default: %(default)g)",
    )


def _make_run_parser() -> _Parser:
    parser = _Parser(
        prog="lockstep run",
        usage="lockstep run [options] script.py [args ...]\n       lockstep run [options] -m module [args ...]",
        description=_RUN_DESCRIPTION,
        epilog=_RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_nproc(parser)
    parser.add_argument(
        "-m", "--module", dest="is_module", action="store_true", help="run a module, as `python -m` does"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--no-prefix",
        dest="prefix",
        action="store_false",
        help="let the ranks write to the terminal themselves, without `[rank]` before each line",
    )
    output.add_argument("--log-dir", metavar="DIR", help="write the output to DIR/rank<r>.log, one file per rank")
    parser.add_argument(
        "--max-restarts", type=int, metavar="K", default=0, help="after a failure start all ranks again, up to K times"
    )
    _add_grace(parser)
    parser.add_argument(
        "--master-addr",
        "--master_addr",
        metavar="ADDR",
        default=LaunchConfig.master_addr,
        help="MASTER_ADDR, for scripts that ask torch for env:// (default: %(default)s)",
    )
    parser.add_argument(
        "--master-port",
        "--master_port",
        type=int,
        metavar="PORT",
        help="MASTER_PORT, for scripts that ask torch for env:// (default: a free one)",
    )
    return parser


def _split_at_script(arguments: Sequence[str]) -> tuple[list[str], str | None, tuple[str, ...]]:
    """The launcher's options, the script, and what belongs to the script."""
    index = 0
    while index < len(arguments):
        word = arguments[index]
        if word == "--":
            return list(arguments[:index]), *_head_and_tail(arguments[index + 1 :])
        if not word.startswith("-") or word == "-":
            break
        index += 1 if word in _RUN_FLAGS or "=" in word else 2
    return list(arguments[:index]), *_head_and_tail(arguments[index:])


def _head_and_tail(words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    return (words[0], tuple(words[1:])) if words else (None, ())


def _run(arguments: Sequence[str]) -> int:
    options, script, script_arguments = _split_at_script(arguments)
    if "--slurm" in options:
        return _run_on_slurm(options, script, script_arguments)
    parser = _make_run_parser()
    chosen = parser.parse_args(options)
    if script is None:
        parser.error("name a module to run after -m" if chosen.is_module else "name a script to run")
    slurm.warn_of_other_tasks()
    return launch_job(LaunchConfig(target=script, args=script_arguments, **vars(chosen)))


def _run_on_slurm(options: Sequence[str], script: str | None, script_arguments: Sequence[str]) -> int:
    parser = _Parser(
        prog="lockstep run --slurm",
        usage="lockstep run --slurm [options] script.py [args ...]\n"
        "       lockstep run --slurm [options] -m module [args ...]",
        description=_SLURM_DESCRIPTION,
        epilog=_SLURM_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
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


def _train(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_TRAIN_OVERVIEW.format(recipes=", ".join(_RECIPES)), end="")
        return 0 if arguments else _USAGE_CODE
    name, *options = arguments
    if name not in _RECIPES:
        raise LaunchError(f"there is no recipe {name!r}{_suggest(name, _RECIPES)}; there is: {', '.join(_RECIPES)}")
    launcher = _Parser(add_help=False, allow_abbrev=False)
    group = launcher.add_argument_group("launching")
    _add_nproc(group)
    _add_grace(group)
    whole = _Parser(prog=f"lockstep train {name}", parents=[launcher], allow_abbrev=False)
    importlib.import_module(_RECIPES[name]).add_arguments(whole)
    whole.parse_args(options)  # Says now, and once, what every rank would say; and shows the help.
    chosen, recipe_options = launcher.parse_known_args(options)
    slurm.warn_of_other_tasks()
    return launch_job(
        LaunchConfig(
            target=_RECIPES[name],
            args=tuple(recipe_options),
            nproc=chosen.nproc,
            grace_s=chosen.grace_s,
            is_module=True,
            prefix=False,
        )
    )


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"run": _run, "train": _train}


def _suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments:
        print(_OVERVIEW, end="", file=sys.stderr)
        return _USAGE_CODE
    command, *rest = arguments
    if command in ("-h", "--help", "help"):
        print(_OVERVIEW, end="")
        return 0
    if command == "--version":
        print(f"lockstep {lockstep.__version__}")
        return 0
    if command not in _COMMANDS:
        is_script = command.endswith(".py")
        hint = f", did you mean `lockstep run {command}`?" if is_script else _suggest(command, _COMMANDS)
        raise LaunchError(f"there is no command {command!r}{hint}; there are: {', '.join(_COMMANDS)}")
    return _COMMANDS[command](rest)


def main(arguments: Sequence[str] | None = None) -> int:
    """The `lockstep` command.

    Args:
        arguments: without the program's name; None for those of this process.

    Returns:
        The exit code: that of the job, or 2 for what cannot be started, after one line on stderr.
    """
    try:
        return _dispatch(sys.argv[1:] if arguments is None else arguments)
    except SetupError as error:
        say(f"lockstep: error: {error}\n")
        return _USAGE_CODE
    except KeyboardInterrupt:
        return _INTERRUPTED_CODE
