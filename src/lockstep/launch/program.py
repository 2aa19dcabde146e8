"""Runs a rank that is not a Python script: `python -m lockstep.launch.program PROGRAM ARGS…` becomes that program.

Run by the bootstrap (`worker.py`), so that the program is killed with the launcher like every rank: the parent death
signal survives exec.
"""

from __future__ import annotations

import os
import sys

__all__ = []

if __name__ == "__main__":
    os.execvp(sys.argv[1], sys.argv[1:])
