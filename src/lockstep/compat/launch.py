"""`python -m lockstep.compat.launch`: what `python -m torch.distributed.launch` was. See `legacy/launch.py`."""

from __future__ import annotations

import runpy

__all__ = []

if __name__ == "__main__":
    runpy.run_module("lockstep.compat.legacy.launch", run_name="__main__")
