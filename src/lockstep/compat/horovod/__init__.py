"""The shim of Horovod: `import lockstep.compat.horovod.torch as hvd`, `horovod.run`, `lockstep horovodrun`.

Names and behaviour are those of Horovod 0.28; process groups, gradient buckets and launchers are Lockstep's. All
names, and whether each is supported, different or refused:

hvd                                | what      | remark
-----------------------------------|-----------|------------------------------------------------------------------
init                               | different | `comm`: None, all ranks, or MPI.COMM_WORLD; subsets are refused
shutdown, is_initialized           | supported | init again works, with every launcher of one host
size, local_size, cross_size       | supported |
rank, local_rank, cross_rank       | supported |
is_homogeneous                     | supported |
mpi_threads_supported, mpi_enabled | supported |
mpi_built                          | different | whether mpi4py is installed
gloo_enabled                       | different | whether the ranks do not use MPI
gloo_built, nccl_built             | supported |
cuda_built, rocm_built             | different | PyTorch's
ddl_built, ccl_built               | supported | always False
start_timeline, stop_timeline      | different | needs no HOROVOD_TIMELINE=DYNAMIC
Average, Sum                       | supported |
Adasum                             | supported | also on the CPU without MPI; of hosts' means for tensors on GPUs
Min, Max, Product                  | different | refused after a rank has joined: its zeros would count
HorovodInternalError               | different | also names the operation and line of each rank
HostsUpdatedInterrupt              | supported |
allreduce, allreduce_async         | different | more dtypes: 8- and 16-bit integers, bfloat16, complex
allreduce_, allreduce_async_       | different | the same
grouped_allreduce                  | different | the same
grouped_allreduce_async            | different | the same
grouped_allreduce_                 | different | the same
grouped_allreduce_async_           | different | the same
sparse_allreduce_async             | supported |
allgather, allgather_async         | supported |
grouped_allgather                  | supported |
grouped_allgather_async            | supported |
broadcast, broadcast_async         | supported |
broadcast_, broadcast_async_       | supported |
alltoall, alltoall_async           | supported |
reducescatter                      | supported |
reducescatter_async                | supported |
grouped_reducescatter              | supported |
grouped_reducescatter_async        | supported |
join                               | supported |
barrier                            | supported |
poll, synchronize                  | supported |
DistributedOptimizer               | different | keeps the wrapped optimizer's state; also reduces in closures
Compression                        | supported |
broadcast_parameters               | different | also accepts `model.parameters()`
broadcast_optimizer_state          | different | copies the root's state as it is, without a step
broadcast_object                   | supported | by cloudpickle if installed, otherwise pickle
allgather_object                   | different | also accepts a process set
SyncBatchNorm                      | different | also on the CPU
ProcessSet                         | supported |
global_process_set                 | supported |
add_process_set                    | different | needs no HOROVOD_DYNAMIC_PROCESS_SETS=1
remove_process_set                 | different | the same
elastic                            | supported |
elastic.run                        | supported |
elastic.TorchState                 | different | under horovodrun, commits survive a restart of all ranks
elastic.State, elastic.ObjectState | different | any rank may report updated hosts, not only rank 0
elastic.ElasticSampler             | supported |

horovod                            | what      | remark
-----------------------------------|-----------|------------------------------------------------------------------
run                                | different | on this host; other hosts and MPI are refused, with what to do instead
torch                              | supported | the table above
tensorflow, keras, mxnet, spark    | refused   | missing; Lockstep is for PyTorch

`init` also creates torch.distributed's default group, so `torch.distributed.is_initialized()` is True and a later
`init_process_group` is an error. A library that prefers this group to Horovod, as Ignite does, must be told "horovod".

Of Horovod's environment variables, HOROVOD_TIMELINE, HOROVOD_TIMELINE_MARK_CYCLES and HOROVOD_STALL_… are read;
those for tuning (fusion, cycles, caches, hierarchies) have no counterpart. Options are in `commands/horovodrun.py`.

General layout:

* `torch`: `horovod.torch`, with its own map; `runner`: `horovod.run`.
* `common`: the exceptions.
"""

from __future__ import annotations

from lockstep.compat.horovod.runner import run

__all__ = ["__version__", "run"]

__version__ = "0.28.1"
