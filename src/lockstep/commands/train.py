"""`lockstep train`: a recipe that comes with Lockstep."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from lockstep.commands.parsing import Parser, add_grace, add_nproc, suggest
from lockstep.errors import LaunchError
from lockstep.launch import slurm
from lockstep.launch.command import USAGE_CODE
from lockstep.launch.config import LaunchConfig
from lockstep.launch.supervisor import launch_job

__all__ = ["main"]

_RECIPES = {"digits": "lockstep.recipes.digits"}

_OVERVIEW = """\
usage: lockstep train <recipe> [options]

recipes: {recipes}

`lockstep train <recipe> --help` shows its options
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: the words after `lockstep train`.

    Returns:
        The exit code of the job.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_OVERVIEW.format(recipes=", ".join(_RECIPES)), end="")
        return 0 if arguments else USAGE_CODE
    name, *options = arguments
    if name not in _RECIPES:
        raise LaunchError(f"there is no recipe {name!r}{suggest(name, _RECIPES)}; there is: {', '.join(_RECIPES)}")
    launcher = Parser(add_help=False, allow_abbrev=False)
    group = launcher.add_argument_group("launching")
    add_nproc(group)
    add_grace(group)
    whole = Parser(prog=f"lockstep train {name}", parents=[launcher], allow_abbrev=False)
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
