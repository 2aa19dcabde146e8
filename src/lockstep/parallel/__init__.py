"""Models on several ranks, and on several devices of one process."""

from lockstep.parallel.application import parallel_apply
from lockstep.parallel.data_parallel import DataParallel, data_parallel
from lockstep.parallel.distributed import DistributedDataParallel
from lockstep.parallel.replication import replicate
from lockstep.parallel.scatter_gather import gather, scatter, scatter_kwargs

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
    "scatter_kwargs",
]
