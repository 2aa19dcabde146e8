"""Importing this installs all shims: programs for Horovod, Apex and the torch.distributed of 2018 run unedited.

`lockstep run` and `lockstep launch` import it in every rank before the script starts, unless told `--no-compat`.
Elsewhere a program, or a test, says `import lockstep.compat.install`. It is the one module of the package whose import
has an effect:

* `import horovod…` and `import apex…` find `lockstep.compat.…` where the real packages are not installed (`finder.py`);
* when torch has been imported, or at once if it has, it is changed as far as the script needs it (`legacy`): most
  scripts need nothing, and find torch untouched;
* processes that `multiprocessing` spawns do the same before they import anything of the script. What the script starts
  by `subprocess` is left alone: `python -m lockstep.compat.script`, with no launcher, is for that.

It imports no torch, and no multiprocessing, which would take the bootstrap of a rank for the main module.
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
    """Install the shims in this process, and in those it spawns. Local; twice does no harm.

    Args:
        choice: what the script needs of torch; None to read it from LOCKSTEP_OLD_TORCH, or from the script itself once
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
    except Exception as error:  # A torch of tomorrow, which must be importable all the same.
        get_logger(__name__).warning("torch cannot be changed for old scripts: %r", error)
    else:
        if sentence := choice.sentence(done):
            print_notice(sentence)


def _say_at_use(change: str, _: str) -> None:
    if change not in _said and change in SAID_AT_USE:
        _said.add(change)
        callsite = importlib.import_module("lockstep.comm.callsite")  # of torch's world, which is not there earlier
        file, line, _ = callsite.call_site()
        if sentence := _choice().sentence_at_use(change, f"{os.path.basename(file)}:{line}"):
            print_notice(sentence, in_first_child=True)


def explain(error: BaseException) -> None:
    """Say, on rank 0, that `--compat` would have prevented an error that ended the script. Local."""
    package = hint_for_told(error)
    if package is not None:
        print_notice(
            f'importlib.util.find_spec("{package}") has said that {package} is not installed; with `--compat` it finds '
            f"lockstep.compat.{package}"
        )
    name = hint_for(error)
    if name is not None and name not in _choice().changes:
        print_notice(f"older releases of torch took this: with `--compat`, {CHANGES[name]}")


class _Reopening:
    """Installs the shims where it is unpickled, if Lockstep can be found there.

    Args:
        choice: what this process has chosen for its script; children get the same.
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
    """Make what multiprocessing sends to a child first, before it names the main module, install the shims there."""
    spawn: Any = sys.modules["multiprocessing.spawn"]
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"lockstep": _Reopening(_choice()), **prepare(name)}

    spawn.get_preparation_data = get_preparation_data


install()
