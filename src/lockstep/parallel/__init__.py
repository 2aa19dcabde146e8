"""Models on several ranks; and the names of `torch.nn.parallel` for one process with several devices.

General layout. `DistributedDataParallel`, one model on every rank:

* `distributed`: what users see: construction, and what happens around a forward pass.
* `backward_pass`: what happens from the first gradient to the means, by its moments; a drawing of its phases.
* `reducer`: the gradients of a backward pass in their buckets.
* `forward_pass`, `graph`: which backward pass it is, with what weight, and what it reaches.
* `feeding`, `rows`: how many samples of the global batch a forward pass holds.
* `checks`: what an engine can be given.
* `buckets`, `gradient_memory`: where each gradient lies; `sparse_gradients`: those that lie in no bucket.
* `transports`, `symmetric`: how a full bucket is averaged; `comm_hooks`: by a hook of the user's.
* `sharded`: a share of each parameter on each rank; a package with a map of its own.
* `rank_agreement`: whether all ranks have the same model, understood a step alike, and hold the same parameters.
* `joined`: ranks that run out of batches at different times; `closures`: `torch.optim.LBFGS`.
* `parameter_changes`: parameters that no engine averages.
* `powersgd`: a communication hook that sends fewer bytes.

Losses and layers over all ranks:

* `losses`: losses that are not a mean over samples.
* `batchnorm`: `SyncBatchNorm`.

`DataParallel`, one process with several devices, is `lockstep.replicas`.
"""

from lockstep.parallel.distributed import DistributedDataParallel
from lockstep.replicas.data_parallel import DataParallel, data_parallel
from lockstep.replicas.parallel_apply import parallel_apply
from lockstep.replicas.replicate import replicate
from lockstep.replicas.scatter_gather import gather, scatter, scatter_kwargs

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
