"""Ends the NCCL groups that a script has left open, where it failed or never left its world.

[Note: nccl at the end] NCCL's group aborts its communicators when the interpreter frees it, since nobody wants a result
any more, and warns that `destroy_process_group()` was not called. A script that ends with an error could not call it:
its peers are not there, and `destroy_process_group()` waits for them. So an exit handler aborts the groups of a world
of ours, or of any script under our launcher, a moment earlier, after which the destructor has nothing to do or to say.
(Read in torch's source, `ProcessGroupNCCL.cpp`.)
"""

from __future__ import annotations

import atexit
import os

import torch.distributed as dist

from lockstep.torch_private.groups import open_groups

__all__ = ["abort_at_exit"]

_pid = 0  # of the process that has the exit handler


def abort_at_exit() -> None:
    """From now on abort, at the end of this process, the groups that are still open then. Local."""
    global _pid
    if _pid != os.getpid():
        _pid = os.getpid()
        atexit.register(_abort_open_groups, _pid)


def _abort_open_groups(pid: int) -> None:
    if pid == os.getpid():  # a forked child has none of its own
        for group in open_groups():
            if "nccl" in dist.get_backend_config(group):
                group.abort()
