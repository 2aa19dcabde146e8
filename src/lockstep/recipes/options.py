"""Options that all recipes share: checked values, and the folder of a run.

Does not import torch, because the process that starts the ranks reads options too.
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
    """A parser of integers of at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small; expected {least} or more")
        return value

    return parse


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is out of range; expected a number above 0")
    return value


def rate(text: str) -> float:
    """Parse a finite number of at least 0."""
    value = _number(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is out of range; expected 0 or more")
    return value


def folder_name(text: str) -> str:
    """Parse the name of a folder, which must not be a path."""
    if not text or text in (".", "..") or "/" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder name; use --out to choose where runs are kept")
    return text


def existing_folder(text: str) -> Path:
    """Parse the path of an existing folder."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"folder {text!r} does not exist")
    return path


def existing_path(text: str) -> Path | None:
    """Parse the path of an existing run folder or checkpoint file; None for "", the default of many scripts."""
    if not text:
        return None
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text!r} does not exist; expected a run folder or a checkpoint file")
    return path


def add_run_options(parser: argparse.ArgumentParser, recipe: str, backend: Sequence[str] = ("--backend",)) -> None:
    """Add `--name`, `--out`, `--backend`, `--resume` and `--quiet`.

    Args:
        parser: parser to which a group "run" is added.
        recipe: name of the recipe; the default name of runs.
        backend: spellings of `--backend`.
    """
    run = parser.add_argument_group("run")
    run.add_argument(
        "--name", type=folder_name, help=f"folder for the run inside --out (default: {recipe}, {recipe}-2, …)"
    )
    run.add_argument("--out", type=Path, metavar="DIR", help=f"where runs are kept (default: {DEFAULT_OUT})")
    run.add_argument(*backend, dest="backend", default="auto", help="process group backend (default: auto)")
    run.add_argument(
        "--resume",
        type=existing_path,
        metavar="PATH",
        help="resume from a run folder or a checkpoint file; continues in that folder, or in a new one with --name "
        "or --out",
    )
    run.add_argument("--quiet", action="store_true", help="print errors only")


def check_packages(recipe: str, packages: Mapping[str, str]) -> None:
    """Check for missing packages, before any rank starts, so that they are reported once.

    Args:
        recipe: name of the recipe, for the message.
        packages: name of a module -> name of its package.

    Raises:
        SetupError: one is not installed.
    """
    missing = [package for module, package in packages.items() if find_spec(module) is None]
    if missing:
        raise SetupError(f"the {recipe} recipe needs {' and '.join(missing)}: pip install {' '.join(missing).lower()}")


def merge_with_saved(
    given: argparse.Namespace,
    names: Collection[str],
    saved: Mapping[str, Any] | None,
    may_change: Collection[str],
) -> dict[str, Any]:
    """The values given by options and, when resuming, a checkpoint.

    Args:
        given: parsed options; None means that the option was not given. Its `resume` names the checkpoint.
        names: names of the options.
        saved: their values in the checkpoint to resume from.
        may_change: names of options that may change when a run is resumed.

    Raises:
        InputError: an option contradicts the checkpoint, and cannot change during a run.
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
    """The configuration stored in a checkpoint.

    Args:
        state: contents of the checkpoint.
        path: its path, for the message.
        recipe: name of the recipe that resumes it.

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
    """Check that a resumed run has epochs left; arguments as for `saved_config`.

    Raises:
        InputError: all epochs are done.
    """
    if state["epoch"] >= epochs:
        done = "1 epoch" if state["epoch"] == 1 else f"{state['epoch']} epochs"
        raise InputError(f"{path} has done {done} already; raise --epochs to continue")


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is out of range; expected a finite number")
    return value
