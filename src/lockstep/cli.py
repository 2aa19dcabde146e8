"""The `lockstep` command: finds the module of a command and runs it.

Plain argparse and no torch, so that ranks start quickly. Little is imported at the top, because Ctrl-C during these
imports shows Python's traceback; everything else is imported under `ends_by_ctrl_c`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import lockstep
from lockstep.launch.signals import ends_by_ctrl_c
from lockstep.launch.standard_streams import fill_closed

__all__ = ["main"]


class _Command(NamedTuple):
    """A command: the module with its `main`, its line in the overview, and whether it starts processes."""

    module: str
    summary: str
    example: str
    starts: bool = True


_COMMANDS = {
    "run": _Command(
        "lockstep.commands.run", "start N processes of any script", "lockstep run --nproc 2 train.py --lr 0.1"
    ),
    "verify": _Command(
        "lockstep.commands.verify",
        "say where N processes part from one",
        "lockstep verify --nproc 2,3 train.py",
    ),
    "rehearse": _Command(
        "lockstep.commands.rehearse",
        "say what would fail in a script on GPUs",
        "lockstep rehearse --nproc 4 train.py",
    ),
    "launch": _Command(
        "lockstep.commands.launch",
        "torch.distributed.launch's command line",
        "lockstep launch --nproc_per_node=2 main.py",
    ),
    "horovodrun": _Command(
        "lockstep.commands.horovodrun",
        "horovodrun's command line",
        "lockstep horovodrun -np 2 python train.py",
    ),
    "train": _Command(
        "lockstep.commands.train", "train a recipe that comes with it", "lockstep train digits --nproc 2"
    ),
    "data": _Command(
        "lockstep.commands.data", "draw images to try a recipe with", "lockstep data make-imagenet shapes", starts=False
    ),
    "bench": _Command("lockstep.commands.bench", "measure training on this machine", "lockstep bench strategies"),
    "doctor": _Command(
        "lockstep.commands.doctor",
        "look at this machine, or at every verb",
        "lockstep doctor --capabilities",
        starts=False,
    ),
}


def _overview() -> str:
    width = max(map(len, _COMMANDS))
    column = max(len(one.summary) for one in _COMMANDS.values())
    lines = [f"  {name:{width}}   {one.summary:{column}}   {one.example}" for name, one in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: lockstep <command> ...",
            "",
            "Synchronous data-parallel training: N processes, one answer.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  -h, --help   show this help; `lockstep <command> --help` shows a command's own",
            "  --version    show the version",
            "",
        ]
    )


def _dispatch(arguments: Sequence[str]) -> int:
    from lockstep.launch.command import USAGE_CODE

    if not arguments:
        print(_overview(), end="", file=sys.stderr)
        return USAGE_CODE
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        print(_overview(), end="")
        return 0
    if name == "--version":
        print(f"lockstep {lockstep.__version__}")
        return 0
    return _find(name)(rest)


def _find(name: str) -> Callable[[Sequence[str]], int]:
    """The `main` of a command.

    Raises:
        LaunchError: there is no such command, or it cannot work on this system.
    """
    with ends_by_ctrl_c():
        from lockstep.errors import LaunchError
        from lockstep.launch import support
        from lockstep.similar import suggest

    if name not in _COMMANDS:
        is_script = name.endswith(".py")
        hint = f", did you mean `lockstep run {name}`?" if is_script else suggest(name, _COMMANDS)
        raise LaunchError(f"unknown command {name!r}{hint or '.'} Commands: {', '.join(_COMMANDS)}")
    if _COMMANDS[name].starts:
        support.check()  # first, because some of its modules cannot even be imported elsewhere
    with ends_by_ctrl_c():
        main: Callable[[Sequence[str]], int] = importlib.import_module(_COMMANDS[name].module).main
    return main


def main(arguments: Sequence[str] | None = None) -> int:
    """The `lockstep` command.

    Args:
        arguments: arguments without the program's name; None for those of this process.

    Returns:
        The exit code: that of the job, or 2 if it cannot be started, after one line on stderr.
    """
    fill_closed()
    with ends_by_ctrl_c():
        from lockstep.launch.command import exit_code_of
    return exit_code_of(lambda: _dispatch(sys.argv[1:] if arguments is None else arguments))
