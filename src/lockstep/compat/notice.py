"""Messages of the shims to the user who started the job: the first process prints each once. Imports no torch."""

from __future__ import annotations

import sys
from typing import Any

from lockstep import env
from lockstep.errors import SetupError
from lockstep.topology import read_topology

__all__ = ["opt_out", "print_notice"]


def opt_out() -> str:
    """What keeps the shims out, as this process was started: an option of our launchers, else a variable. Local."""
    return "--no-compat" if env.LOCKSTEP_RENDEZVOUS.get() is not None else "LOCKSTEP_COMPAT=0"


def print_notice(text: str, *, in_first_child: bool = False) -> None:
    """Print a line on stderr: on rank 0 of the first attempt, and not in processes that it has spawned. Local.

    Args:
        text: the line.
        in_first_child: print it in the first process that each has spawned, too; for what its parent does not see.
    """
    is_first = _rank() == 0 and env.TORCHELASTIC_RESTART_COUNT.get() in (None, 0)
    # Not imported for this: it would take what is the main module now for that of the script.
    processes = sys.modules.get("multiprocessing.process")
    if is_first and (not _is_spawned(processes) or (in_first_child and _is_first_child(processes))):
        print(f"lockstep: {text}", file=sys.stderr, flush=True)


def _rank() -> int:
    """Of this process, whichever launcher has started it."""
    try:
        return read_topology(env.snapshot()).rank
    except SetupError:
        return env.RANK.get() or 0  # lockstep.init() will say what is wrong


def _is_spawned(processes: Any) -> bool:
    """Whether multiprocessing has made this process, whose main module may still be on its way in."""
    if processes is None:
        return False
    return processes.parent_process() is not None or getattr(processes.current_process(), "_inheriting", False)


def _is_first_child(processes: Any) -> bool:
    return str(processes.current_process().name).endswith("-1")  # SpawnProcess-1; a child of a child is …-1:1
