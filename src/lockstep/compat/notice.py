"""Messages of the shims to the user, each printed once, by the first process. Does not import torch."""

from __future__ import annotations

import sys
from typing import Any

from lockstep import env
from lockstep.errors import SetupError
from lockstep.topology import read_topology

__all__ = ["opt_out", "print_notice"]


def opt_out() -> str:
    """How to disable the shims: by an option if Lockstep's launcher is used, otherwise by a variable. Local."""
    return "--no-compat" if env.LOCKSTEP_RENDEZVOUS.get() is not None else "LOCKSTEP_COMPAT=0"


def print_notice(text: str, *, in_first_child: bool = False) -> None:
    """Print a line on stderr: on rank 0 of the first attempt, but not in processes that it spawns. Local.

    Args:
        text: the line.
        in_first_child: also print it in the first process that each spawns, for messages about children only.
    """
    is_first = _rank() == 0 and env.TORCHELASTIC_RESTART_COUNT.get() in (None, 0)
    # Not imported here, because it would take the current main module for that of the script.
    processes = sys.modules.get("multiprocessing.process")
    if is_first and (not _is_spawned(processes) or (in_first_child and _is_first_child(processes))):
        print(f"lockstep: {text}", file=sys.stderr, flush=True)


def _rank() -> int:
    """The rank of this process, with any launcher."""
    try:
        return read_topology(env.snapshot()).rank
    except SetupError:
        return env.RANK.get() or 0  # lockstep.init() will report the error


def _is_spawned(processes: Any) -> bool:
    """Whether multiprocessing created this process, whose main module may not be loaded yet."""
    if processes is None:
        return False
    return processes.parent_process() is not None or getattr(processes.current_process(), "_inheriting", False)


def _is_first_child(processes: Any) -> bool:
    return str(processes.current_process().name).endswith("-1")  # SpawnProcess-1; a child of a child is …-1:1
