"""`apex.parallel`: DDP, batch normalization over ranks, LARC. See the table in `lockstep.compat.apex`.

General layout:

* `distributed`: `DistributedDataParallel` and `Reducer`; `sync_batchnorm`, `optimized_sync_batchnorm`: `SyncBatchNorm`.
* `LARC`: layer-wise learning rates for an optimizer.
* `multiproc`: starts a process per GPU.
"""

from __future__ import annotations

from torch.distributed import ReduceOp

from lockstep.compat.apex.parallel import optimized_sync_batchnorm
from lockstep.compat.apex.parallel.distributed import DistributedDataParallel, Reducer
from lockstep.compat.apex.parallel.LARC import LARC
from lockstep.compat.apex.parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "optimized_sync_batchnorm",
]
