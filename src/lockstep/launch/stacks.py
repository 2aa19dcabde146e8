"""Prints the stacks of each rank's threads, by py-spy, which reads the memory of a process from outside.

It needs no cooperation of the process, so it works for a rank that hangs in native code, or is stopped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["dump_stacks", "find_py_spy"]

_DEADLINE_S = 10.0
_MISSING = "lockstep: no stacks: py-spy is not installed (pip install py-spy)\n"


def find_py_spy() -> str | None:
    """The path of py-spy, or None if it is not installed. Next to the interpreter first, which may not be on PATH."""
    own = Path(sys.executable).with_name("py-spy")
    return str(own) if own.exists() else shutil.which("py-spy")


def dump_stacks(pids: Mapping[int, int]) -> str:
    """The Python stacks of all threads of some ranks. Local; takes a fraction of a second, at most ten seconds.

    Args:
        pids: rank -> pid of the ranks that are alive.

    Returns:
        Text to print: a block for each rank, or one line if py-spy is not installed.
    """
    program = find_py_spy()
    if program is None:
        return _MISSING
    # Nonblocking: py-spy cannot stop a rank that is already stopped.
    running = {
        rank: subprocess.Popen(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for rank, pid in sorted(pids.items())
    }
    deadline = time.monotonic() + _DEADLINE_S
    return "".join(_collect(rank, process, deadline) for rank, process in running.items())


def _collect(rank: int, process: subprocess.Popen[str], deadline: float) -> str:
    try:
        stacks, errors = process.communicate(timeout=max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"lockstep: no stack of rank {rank}: py-spy did not finish\n"
    if process.returncode != 0:
        reason = " ".join(errors.split()) or f"py-spy exited with code {process.returncode}"
        return f"lockstep: no stack of rank {rank}: {reason}\n"
    return f"lockstep: stacks of rank {rank}\n{stacks.rstrip()}\n"
