"""What the options of all recipes have in common: values that are checked, and where a run is kept.

Imports no torch: the process that starts the ranks reads options, too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, InputError, SetupError

__all__ = [
    "DEFAULT_OUT",
    "add_run_options",
    "check_epochs_left",
    "check_packages",
    "existing_folder",
    "existing_path",
    "folder_name",
    "merge_with_saved",
    "positive",
    "rate",
    "saved_config",
    "whole_number",
]

DEFAULT_OUT = Path("runs")


def whole_number(least: int) -> Callable[[str], int]:
    """A parser of whole numbers of at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small; give {least} or more")
        return value

    return parse


def positive(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is out of range; give a number above 0")
    return value


def rate(text: str) -> float:
    """A finite number of 0 or more."""
    value = _number(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is out of range; give 0 or more")
    return value


def folder_name(text: str) -> str:
    """The name of one folder, no path."""
    if not text or text in (".", "..") or "/" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no folder name; use --out to choose where runs are kept")
    return text


def existing_folder(text: str) -> Path:
    """A folder that is there."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}")
    return path


def existing_path(text: str) -> Path | None:
    """A run's folder or a checkpoint file that is there; None for "", the default of many scripts."""
    if not text:
        return None
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"there is nothing at {text!r}; give a run's folder or a checkpoint file")
    return path


def add_run_options(parser: argparse.ArgumentParser, recipe: str, backend: Sequence[str] = ("--backend",)) -> None:
    """`--name`, `--out`, `--backend`, `--resume` and `--quiet`: where a run is kept, and what it resumes from.

    Args:
        parser: gets a group "run".
        recipe: its name is that of runs that are given none.
        backend: spellings of `--backend`.
    """
    run = parser.add_argument_group("run")
    run.add_argument(
        "--name", type=folder_name, help=f"folder of the run inside --out (default: {recipe}, {recipe}-2, …)"
    )
    run.add_argument("--out", type=Path, metavar="DIR", help=f"where runs are kept (default: {DEFAULT_OUT})")
    run.add_argument(*backend, dest="backend", default="auto", help="process group backend (default: auto)")
    run.add_argument(
        "--resume",
        type=existing_path,
        metavar="PATH",
        help="resume from a run's folder or from one checkpoint file, in that run's folder; in a new one with --name "
        "or --out",
    )
    run.add_argument("--quiet", action="store_true", help="print nothing but errors")


def check_packages(recipe: str, packages: Mapping[str, str]) -> None:
    """Find packages that are missing. Said before any rank is started, it is said once.

    Args:
        recipe: whose they are, for the message.
        packages: name of a module -> name of the package that brings it.

    Raises:
        SetupError: one is not installed here.
    """
    missing = [package for module, package in packages.items() if find_spec(module) is None]
    if missing:
        raise SetupError(
            f"the {recipe} recipe needs {' and '.join(missing)}, not installed here: "
            f"pip install {' '.join(missing).lower()}"
        )


def merge_with_saved(
    given: argparse.Namespace,
    names: Collection[str],
    saved: Mapping[str, Any] | None,
    may_change: Collection[str],
) -> dict[str, Any]:
    """The values that options and, when resuming, a checkpoint make together.

    Args:
        given: parsed options; None means that the option was not given. Its `resume` names the checkpoint.
        names: of the options.
        saved: their values in the checkpoint that is resumed.
        may_change: names of those that may be given anew when a run is resumed.

    Raises:
        InputError: an option contradicts the checkpoint in what cannot change half way.
    """
    values: dict[str, Any] = dict(saved or {})
    for name in names:
        value = getattr(given, name)
        if value is None:
            continue
        if saved is not None and name not in may_change and value != saved[name]:
            option = "--" + name.replace("_", "-")
            raise InputError(
                f"{option} is {value}, but {given.resume} was trained with {saved[name]}: "
                f"leave {option} out to resume it, or start a new run without --resume"
            )
        values[name] = value
    return values


def saved_config(state: Mapping[str, Any], path: Path, recipe: str) -> dict[str, Any]:
    """The configuration that a checkpoint was written with.

    Args:
        state: what the checkpoint holds.
        path: where it is.
        recipe: that resumes it.

    Raises:
        CheckpointError: another program wrote it.
    """
    extra = state.get("extra", {})
    if extra.get("recipe") != recipe:
        raise CheckpointError(
            f"{path} was not written by the {recipe} recipe; --resume takes a run of `train {recipe}`"
        )
    config: dict[str, Any] = extra["config"]
    return config


def check_epochs_left(state: Mapping[str, Any], path: Path, epochs: int) -> None:
    """Find that a run which is resumed has nothing left to do; arguments as for `saved_config`.

    Raises:
        InputError: says what to give.
    """
    if state["epoch"] >= epochs:
        done = "1 epoch" if state["epoch"] == 1 else f"{state['epoch']} epochs"
        raise InputError(f"{path} has done {done} already; raise --epochs to train on")


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is out of range; give a finite number")
    return value
