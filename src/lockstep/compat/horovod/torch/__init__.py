"""`import lockstep.compat.horovod.torch as hvd`: Horovod's API for PyTorch, on Lockstep's engine.

The table of names is in `lockstep.compat.horovod`. How it works: a channel for each process set matches by name what
ranks ask for, and runs it on c10d groups ([Note: rounds] in `channel.py`); the optimizer hands gradients to the DDP
engine's buckets ([Note: held back] in `gradients.py`).
"""

from __future__ import annotations

from lockstep.compat.horovod.common.exceptions import HostsUpdatedInterrupt
from lockstep.compat.horovod.torch import elastic, mpi_ops
from lockstep.compat.horovod.torch.compression import Compression
from lockstep.compat.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from lockstep.compat.horovod.torch.mpi_ops import *  # noqa: F403 - as Horovod's own, all of it
from lockstep.compat.horovod.torch.optimizer import DistributedOptimizer
from lockstep.compat.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HostsUpdatedInterrupt",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
]
__all__ += mpi_ops.__all__
