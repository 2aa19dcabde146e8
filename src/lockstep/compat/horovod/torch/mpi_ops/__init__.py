"""The operations, under Horovod's module name.

General layout, from the bottom up:

* `handles`: handles of pending operations, and checks that all operations share.
* `reductions`: allreduce; `gathers`: allgather; `sparse`: allreduce of sparse tensors.
* `broadcasts`: broadcast; `alltoalls`: alltoall; `scatters`: reducescatter.

`__all__` lists Horovod's names: mypy needs it written out, and the modules have more.
"""

# ruff: noqa: F403, F405

from __future__ import annotations

from lockstep.compat.horovod.common.exceptions import HorovodInternalError
from lockstep.compat.horovod.torch.context import *
from lockstep.compat.horovod.torch.mpi_ops.alltoalls import *
from lockstep.compat.horovod.torch.mpi_ops.broadcasts import *
from lockstep.compat.horovod.torch.mpi_ops.gathers import *
from lockstep.compat.horovod.torch.mpi_ops.handles import *
from lockstep.compat.horovod.torch.mpi_ops.reductions import *
from lockstep.compat.horovod.torch.mpi_ops.scatters import *
from lockstep.compat.horovod.torch.mpi_ops.sparse import *
from lockstep.compat.horovod.torch.process_sets import *

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
