"""Aborts NCCL groups that are still open at exit, because the script failed or did not leave its world.

[Note: nccl at the end] NCCL's group aborts its communicators when the interpreter frees it, and warns that
`destroy_process_group()` was not called. A script that ends with an error could not call it: its peers are gone, and
`destroy_process_group()` waits for them. So an exit handler aborts the groups of one of our worlds, or of any script
under our launcher, a moment earlier; then the destructor has nothing left to do, and does not warn. (Read in torch's
source, `ProcessGroupNCCL.cpp`.)
"""

from __future__ import annotations

import atexit
import os

import torch.distributed as dist

from lockstep.torch_private.groups import open_groups

__all__ = ["abort_at_exit"]

_pid = 0  # of the process that has the exit handler


def abort_at_exit() -> None:
    """Abort, when this process exits, the groups that are still open. Local."""
    global _pid
    if _pid != os.getpid():
        _pid = os.getpid()
        atexit.register(_abort_open_groups, _pid)


def _abort_open_groups(pid: int) -> None:
    if pid == os.getpid():  # a forked child has no groups of its own
        for group in open_groups():
            if "nccl" in dist.get_backend_config(group):
                group.abort()
