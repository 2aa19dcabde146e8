"""Shared by the command lines: one-line errors, options of every launcher, finding the script among the arguments."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from lockstep import env
from lockstep.errors import LaunchError
from lockstep.launch.config import LaunchConfig
from lockstep.similar import suggest
from lockstep.topology.mpi import read_mpi

__all__ = ["NPROC_OPTIONS", "Parser", "add_grace", "add_nproc", "check_alone", "hint_of_misplaced", "split_at_script"]

NPROC_OPTIONS = ("-n", "-np", "--nproc", "--nproc-per-node", "--nproc_per_node")


class Parser(argparse.ArgumentParser):
    """Shows descriptions verbatim, accepts no abbreviations, and reports errors in one line."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split(" ", 1)[0].split("=", 1)[0]
        if unknown.startswith("-"):
            message += suggest(unknown, re.findall(r"(?<!\S)--?[a-z][a-z_-]*", self.format_help()))
        raise LaunchError(f"{message}; see `{self.prog} --help`")


def check_alone(command: str) -> None:
    """Refuse to run a command, which starts ranks itself, as one of several ranks of MPI, by a LaunchError."""
    topology = read_mpi(env.snapshot())
    if topology is not None and topology.world_size > 1:
        raise LaunchError(
            f"mpirun has started {topology.world_size} copies of `{command}`. Start it once, without mpirun: it starts "
            "the ranks itself"
        )


def add_nproc(parser: argparse._ActionsContainer) -> None:
    """Add `--nproc`, in every spelling that launchers have; None by default."""
    parser.add_argument(
        *NPROC_OPTIONS,
        dest="nproc",
        metavar="N",
        help="number of processes; auto (default): one per GPU, or one per core if there is no GPU",
    )


class _Grace(argparse.Action):
    """Sets both grace periods: for ranks that exit at once, and for those that save first."""

    def __call__(self, parser: object, namespace: argparse.Namespace, value: object, option: object = None) -> None:
        namespace.grace_s = namespace.stop_grace_s = value


def add_grace(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add `--grace`, which sets `grace_s` and `stop_grace_s`."""
    parser.add_argument(
        "--grace",
        dest="grace_s",
        action=_Grace,
        type=float,
        metavar="SECONDS",
        default=LaunchConfig.grace_s,
        help="time from asking a rank to stop (SIGTERM) to SIGKILL, and for exit handlers of one that raised "
        f"(default: %(default)g; {LaunchConfig.stop_grace_s:g} for ranks that save before they stop, by "
        "world.should_stop)",
    )
    parser.set_defaults(stop_grace_s=LaunchConfig.stop_grace_s)


def split_at_script(arguments: Sequence[str], flags: Collection[str]) -> tuple[list[str], str | None, tuple[str, ...]]:
    """Split into the launcher's options, the script (None if there is none), and the script's arguments.

    argparse itself gets this wrong if the script has options or a `--`.

    Args:
        arguments: all arguments of the command.
        flags: options of the launcher without a value; all others take one.
    """
    index = 0
    while index < len(arguments):
        word = arguments[index]
        if word == "--":
            return list(arguments[:index]), *_head_and_tail(arguments[index + 1 :])
        if not word.startswith("-") or word == "-":
            break
        if word.startswith("-m") and "-m" in flags and len(word) > 2:  # `-mpackage.train`, as in Python
            return [*arguments[:index], "-m"], word[2:], tuple(arguments[index + 1 :])
        has_value = "=" in word or (word[1] != "-" and len(word) > 2 and word not in NPROC_OPTIONS)  # `-n4`
        index += 1 if word in flags or has_value else 2
    return list(arguments[:index]), *_head_and_tail(arguments[index:])


def _head_and_tail(words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    return (words[0], tuple(words[1:])) if words else (None, ())


def hint_of_misplaced(command: str, target: Sequence[str], arguments: Sequence[str]) -> str:
    """A hint if the number of ranks was given after the script, and so passed to the script; otherwise empty.

    Args:
        command: such as "lockstep run".
        target: the script, or `-m` and a module.
        arguments: arguments of the script.
    """
    for place, word in enumerate(arguments):
        name, equals, _ = word.partition("=")
        if name in NPROC_OPTIONS:
            words = arguments[place : place + 1 if equals else place + 2]
            rest = (*arguments[:place], *arguments[place + len(words) :])
            return (
                f"lockstep: `{shlex.join(words)}` comes after the script name, so it was passed to the script; "
                f"did you mean `{command} {shlex.join((*words, *target, *rest))}`?\n"
            )
    return ""
