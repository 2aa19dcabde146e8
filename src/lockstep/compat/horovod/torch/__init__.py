"""`import lockstep.compat.horovod.torch as hvd`: Horovod's API for PyTorch, on Lockstep's engine.

The table of names is in `lockstep.compat.horovod`. How it works: a channel per process set matches the requests of
ranks by name, and runs them on c10d groups ([Note: rounds] in `channel.py`); the optimizer puts gradients into the DDP
engine's buckets ([Note: held back] in `gradients.py`).

General layout, from the bottom up:

* `compression`: compressed gradients; `adasum`: Adasum; `meta`: describes a request to other ranks.
* `request`: an operation requested by this rank; `timeline`: traces the negotiation and execution of requests.
* `execution`: runs agreed requests on c10d groups; `channel`: negotiates the requests of a process set.
* `runtime`: the state of `hvd.init()` in this process; `process_sets`: subsets of the ranks.
* `context`: `hvd.init()`, and queries such as `hvd.rank()`.
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
from lockstep.compat.horovod.torch.mpi_ops import *  # noqa: F403 - everything, as in Horovod
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
