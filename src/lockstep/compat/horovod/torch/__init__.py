"""`import lockstep.compat.horovod.torch as hvd`: Horovod's API for PyTorch, on Lockstep's engine.

The table of names is in `lockstep.compat.horovod`. How it works: a channel for each process set matches by name what
ranks ask for, and runs it on c10d groups ([Note: rounds] in `channel.py`); the optimizer hands gradients to the DDP
engine's buckets ([Note: held back] in `gradients.py`).

General layout, from the bottom up:

* `compression`: what travels instead of a tensor; `adasum`: Adasum's sum; `meta`: describes a request to other ranks.
* `request`: one operation that this rank has asked for; `timeline`: writes when requests were agreed on and run.
* `execution`: runs agreed requests on c10d groups; `channel`: finds out what all ranks of a process set ask for.
* `runtime`: what `hvd.init()` opened in this process; `process_sets`: subsets of the ranks.
* `context`: `hvd.init()` and who this rank is.
* `mpi_ops`: the operations; `functions`: broadcasts of models, optimizers and objects.
* `counting`: counts backward passes until a gradient is complete; `wrapping`: changes the class of an optimizer.
* `gradients`: holds gradients back and reduces them together.
* `optimizer`: `DistributedOptimizer`; `delta_optimizer`: the same for Adasum.
* `sync_batch_norm`: `SyncBatchNorm`; `elastic`: training that resumes after a failure.
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
