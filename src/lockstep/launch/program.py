"""A rank that is no Python script: `python -m lockstep.launch.program PROGRAM ARGS…` becomes that program.

Run by the bootstrap (`worker.py`), so that the program dies with the launcher as every rank does: what a process has
asked the kernel to send it when its parent dies outlives exec.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

__all__ = ["become"]


def become(words: list[str]) -> NoReturn:
    """Replace this process by a program.

    Args:
        words: name or path of the program, and its arguments.

    Raises:
        OSError: the program cannot be run.
    """
    os.execvp(words[0], words)


if __name__ == "__main__":
    become(sys.argv[1:])
