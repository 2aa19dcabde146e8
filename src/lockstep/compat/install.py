"""Importing this installs all shims, so that programs for Horovod, Apex and the torch of 2018 run unedited.

`lockstep run` and `lockstep launch` import it in every rank before the script starts, unless with `--no-compat`.
Elsewhere, use `import lockstep.compat.install`. It is the only module of the package whose import has an effect:

* `import horovod…` and `import apex…` find `lockstep.compat.…` if the real packages are not installed (`finder.py`);
* once torch is imported, it is changed as far as the script needs (`legacy`); most
  scripts need no changes;
* processes spawned by `multiprocessing` do the same before they import the script. Processes that the script starts
  by `subprocess` are not affected; use `python -m lockstep.compat.script` for these.

It imports neither torch nor multiprocessing, which would take a rank's bootstrap module for the main module.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from lockstep.after_import import call_after_import
from lockstep.compat.asking import hint_for_told
from lockstep.compat.finder import ShimFinder
from lockstep.compat.legacy.choice import Choice, choose_here
from lockstep.compat.legacy.needs import CHANGES, SAID_AT_USE, hint_for
from lockstep.compat.notice import print_notice
from lockstep.log import get_logger

__all__ = ["explain", "install"]

_given: list[Choice] = []
_said: set[str] = set()


def install(choice: Choice | None = None) -> None:
    """Install the shims in this process and in those that it spawns. Local; may be called again.

    Args:
        choice: changes to torch for the script; None to read them from LOCKSTEP_OLD_TORCH, or from the script once
            torch is imported.
    """
    if choice is not None:
        _given[:] = [choice]
        _choice.cache_clear()
    if any(isinstance(finder, ShimFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, ShimFinder())
    call_after_import("torch", _change_torch)
    call_after_import("multiprocessing.spawn", _hand_on_to_children)


@functools.cache
def _choice() -> Choice:
    return _given[0] if _given else choose_here()


def _change_torch() -> None:
    choice = _choice()
    if not choice.changes:
        return
    try:
        patches = importlib.import_module("lockstep.compat.legacy.patches")
        done = patches.install(choice.changes)
        patches.listeners.append(_say_at_use)
    except Exception as error:  # Future releases of torch must be importable anyway.
        get_logger(__name__).warning("torch could not be changed for old scripts: %r", error)
    else:
        if sentence := choice.sentence(done):
            print_notice(sentence)


def _say_at_use(change: str, _: str) -> None:
    if change not in _said and change in SAID_AT_USE:
        _said.add(change)
        callsite = importlib.import_module("lockstep.comm.callsite")  # needs torch, so not imported earlier
        file, line, _ = callsite.call_site()
        if sentence := _choice().sentence_at_use(change, f"{os.path.basename(file)}:{line}"):
            print_notice(sentence, in_first_child=True)


def explain(error: BaseException) -> None:
    """Print, on rank 0, that `--compat` would have prevented the error that ended the script. Local."""
    package = hint_for_told(error)
    if package is not None:
        print_notice(
            f'importlib.util.find_spec("{package}") did not find {package}, which is not installed; with `--compat` it '
            f"finds lockstep.compat.{package}"
        )
    name = hint_for(error)
    if name is not None and name not in _choice().changes:
        print_notice(f"older releases of torch allowed this; with `--compat`, {CHANGES[name]}")


class _Reopening:
    """Installs the shims where it is unpickled, if Lockstep can be imported there.

    Args:
        choice: this process's choice, which child processes get too.
    """

    def __init__(self, choice: Choice) -> None:
        self._text = choice.dump()

    def __reduce__(self) -> Any:
        program = (
            "try:\n"
            " from lockstep.compat.install import install\n"
            " from lockstep.compat.legacy.choice import Choice\n"
            "except ImportError:\n"
            " pass\n"
            "else:\n"
            " install(Choice.load(text))"
        )
        return exec, (program, {"text": self._text})


def _hand_on_to_children() -> None:
    """Install the shims in child processes, by the first data that multiprocessing sends, before the main module."""
    spawn: Any = sys.modules["multiprocessing.spawn"]
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"lockstep": _Reopening(_choice()), **prepare(name)}

    spawn.get_preparation_data = get_preparation_data


install()
