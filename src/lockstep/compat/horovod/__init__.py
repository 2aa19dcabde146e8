"""The shim for Horovod: `import lockstep.compat.horovod.torch as hvd`, `horovod.run`, `lockstep horovodrun`.

Names and behaviour are those of Horovod 0.28; process groups, gradient buckets and launchers are Lockstep's. Every
foreign name, and whether it is supported, different or refused:

hvd                                | what      | remark
-----------------------------------|-----------|------------------------------------------------------------------
init                               | different | `comm`: None, all ranks, or MPI.COMM_WORLD; subsets are refused
shutdown, is_initialized           | supported | init again works, with every launcher of one host
size, local_size, cross_size       | supported |
rank, local_rank, cross_rank       | supported |
is_homogeneous                     | supported |
mpi_threads_supported, mpi_enabled | supported |
mpi_built                          | different | mpi4py is installed
gloo_enabled                       | different | the ranks do without MPI
gloo_built, nccl_built             | supported |
cuda_built, rocm_built             | different | those of PyTorch
ddl_built, ccl_built               | supported | always False
start_timeline, stop_timeline      | different | needs no HOROVOD_TIMELINE=DYNAMIC
Average, Sum                       | supported |
Adasum                             | supported | on the CPU without MPI, too; of hosts' means for tensors on GPUs
Min, Max, Product                  | different | refused while a rank has joined: its zeros would count
HorovodInternalError               | different | also says which ranks asked for what, and where
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
DistributedOptimizer               | different | keeps the wrapped optimizer's state; closures are reduced, too
Compression                        | supported |
broadcast_parameters               | different | takes what `model.parameters()` yields, too
broadcast_optimizer_state          | different | copies the root's state as it is; makes no step of its own
broadcast_object                   | supported | cloudpickle where installed, else pickle
allgather_object                   | different | takes a process set, too
SyncBatchNorm                      | different | on the CPU, too
ProcessSet                         | supported |
global_process_set                 | supported |
add_process_set                    | different | needs no HOROVOD_DYNAMIC_PROCESS_SETS=1
remove_process_set                 | different | the same
elastic                            | supported |
elastic.run                        | supported |
elastic.TorchState                 | different | under horovodrun commits outlive a restart of all ranks
elastic.State, elastic.ObjectState | different | any rank may report updated hosts, not only rank 0
elastic.ElasticSampler             | supported |

horovod                            | what      | remark
-----------------------------------|-----------|------------------------------------------------------------------
run                                | different | on this host; other hosts and MPI are refused, with what to do instead
torch                              | supported | the table above
tensorflow, keras, mxnet, spark    | refused   | there is nothing of that name; Lockstep is for PyTorch

Of Horovod's environment variables, HOROVOD_TIMELINE, HOROVOD_TIMELINE_MARK_CYCLES and HOROVOD_STALL_… are read;
those that tune (fusion, cycles, caches, hierarchies) have no counterpart. `lockstep.commands.horovodrun` lists options.

General layout:

* `torch`: `horovod.torch`, which has a map of its own; `runner`: `horovod.run`.
* `common`: the exceptions.
"""

from __future__ import annotations

from lockstep.compat.horovod.runner import run

__all__ = ["__version__", "run"]

__version__ = "0.28.1"
