"""A rank that is no Python script: `python -m lockstep.launch.program PROGRAM ARGS…` becomes that program.

Run by the bootstrap (`worker.py`), so that the program dies with the launcher as every rank does: what a process has
asked the kernel to send it when its parent dies outlives exec.
"""

from __future__ import annotations

import os
import sys

__all__ = []

if __name__ == "__main__":
    os.execvp(sys.argv[1], sys.argv[1:])
