"""Models on several ranks; and the names of `torch.nn.parallel` for one process with several devices.

General layout. `DistributedDataParallel`, one model on every rank:

* `distributed`: the public class: its construction and forward pass.
* `backward_pass`: the events of a backward pass, from the first gradient to the means, with a diagram of its phases.
* `reducer`: sorts the gradients of a backward pass into buckets and averages them.
* `forward_pass`, `graph`: recognise a backward pass, its weight, and the parameters that it reaches.
* `feeding`, `rows`: how many samples of the global batch a forward pass holds.
* `checks`: validates the arguments of an engine.
* `buckets`, `gradient_memory`: where each gradient is stored; `sparse_gradients`: gradients outside buckets.
* `transports`, `symmetric`: average a full bucket; `comm_hooks`: through the user's hook.
* `sharded`: a share of each parameter on each rank; a package with its own layout.
* `rank_agreement`: whether all ranks have the same model, interpret a step alike, and hold the same parameters.
* `claims`: whether they interpret a step alike, over groups that only add.
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
