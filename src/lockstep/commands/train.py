"""`lockstep train`: starts one of Lockstep's recipes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from lockstep.commands.parsing import Parser, add_grace, add_nproc
from lockstep.errors import InputError, LaunchError
from lockstep.launch import slurm
from lockstep.launch.command import USAGE_CODE
from lockstep.launch.config import LaunchConfig
from lockstep.launch.supervisor import launch_job
from lockstep.similar import suggest

__all__ = ["main"]

_RECIPES = {"digits": "lockstep.recipes.digits", "imagenet": "lockstep.recipes.imagenet"}

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
        raise LaunchError(f"unknown recipe {name!r}{suggest(name, _RECIPES) or '.'} Recipes: {', '.join(_RECIPES)}")
    launcher = Parser(add_help=False)
    group = launcher.add_argument_group("launching")
    add_nproc(group)
    add_grace(group)
    whole = Parser(prog=f"lockstep train {name}", parents=[launcher])
    recipe = importlib.import_module(_RECIPES[name])
    recipe.add_arguments(whole)
    given = whole.parse_args(options)  # Reports errors once, not on every rank; and shows the help.
    chosen, recipe_options = launcher.parse_known_args(options)
    nproc: int | str | None = chosen.nproc or "auto"
    if hasattr(recipe, "start"):  # it can be started in other ways than by this launcher
        try:
            start = recipe.start(given, nproc)
        except InputError as mistake:
            raise LaunchError(str(mistake)) from mistake
        nproc, recipe_options = start.nproc, [*start.extra, *recipe_options]
    if nproc is None:
        return int(recipe.main(given))
    slurm.warn_of_other_tasks()
    return launch_job(
        LaunchConfig(
            target=_RECIPES[name],
            args=tuple(recipe_options),
            nproc=nproc,
            grace_s=chosen.grace_s,
            stop_grace_s=chosen.stop_grace_s,
            is_module=True,
            prefix=False,
            explained_code=USAGE_CODE,
        )
    )
