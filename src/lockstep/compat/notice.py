"""Messages of the shims to the user who started the job: the first process prints each once. Imports no torch."""

from __future__ import annotations

import sys
from typing import Any

from lockstep import env

__all__ = ["print_notice"]


def print_notice(text: str) -> None:
    """Print a line on stderr: on rank 0 of the first attempt, and not in processes that it has spawned. Local."""
    is_first = env.RANK.get() in (None, 0) and env.TORCHELASTIC_RESTART_COUNT.get() in (None, 0)
    # Not imported for this: it would take what is the main module now for that of the script.
    if is_first and not _is_spawned(sys.modules.get("multiprocessing.process")):
        print(f"lockstep: {text}", file=sys.stderr, flush=True)


def _is_spawned(processes: Any) -> bool:
    """Whether multiprocessing has made this process, whose main module may still be on its way in."""
    if processes is None:
        return False
    return processes.parent_process() is not None or getattr(processes.current_process(), "_inheriting", False)
