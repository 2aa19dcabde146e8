"""Importing this opens all doors: programs for Horovod, Apex and the torch.distributed of 2018 run unedited.

`lockstep run` and `lockstep launch` import it in every rank before the script starts, unless told `--no-compat`.
Elsewhere a program, or a test, says `import lockstep.compat.install`. It is the one module of the package whose import
has an effect:

* `import horovod…` and `import apex…` find `lockstep.compat.…` where the real packages are not installed (`finder.py`);
* when torch has been imported, or at once if it has, names that it lacks are added (`legacy`);
* processes that `multiprocessing` spawns do the same before they import anything of the script.

It imports no torch, and no multiprocessing, which would take the bootstrap of a rank for the main module.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from lockstep.compat.after_import import call_after_import
from lockstep.compat.finder import DoorFinder
from lockstep.log import get_logger

__all__ = ["install"]


def install() -> None:
    """Open the doors in this process, and in those it spawns. Local; twice does no harm."""
    if any(isinstance(finder, DoorFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, DoorFinder())
    call_after_import("torch", _add_legacy_names)
    call_after_import("multiprocessing.spawn", _hand_on_to_children)


def _add_legacy_names() -> None:
    try:
        importlib.import_module("lockstep.compat.legacy").install()
    except Exception as error:  # A torch of tomorrow, which must be importable all the same.
        get_logger(__name__).warning("names for old scripts cannot be added to this torch: %r", error)


class _Reopening:
    """Opens the doors where it is unpickled, if Lockstep can be found there."""

    def __reduce__(self) -> Any:
        return exec, ("try:\n import lockstep.compat.install\nexcept ImportError:\n pass", {})


def _hand_on_to_children() -> None:
    """Make what multiprocessing sends to a child first, before it names the main module, open the doors there."""
    spawn: Any = sys.modules["multiprocessing.spawn"]
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"lockstep": _Reopening(), **prepare(name)}

    spawn.get_preparation_data = get_preparation_data


install()
