"""What scripts of 2018 to 2021 expect of `torch.distributed`, and today's torch lacks.

`install()` adds all of it, `install(names)` some. Ranks of `lockstep run`, `lockstep launch` and `lockstep horovodrun`,
and scripts that say `import lockstep.compat.install`, get what their text needs (`needs.py`) as soon as torch has been
imported; `--compat` adds all, `--no-compat` nothing. Names that torch has are left alone, except where the table says
that a call is let through which torch turns away. `lockstep launch` takes the command line of
`torch.distributed.launch`.

================================================== =========== ========================================================
what old scripts use                               here        how
================================================== =========== ========================================================
`dist.reduce_op.SUM`, …                            supported   torch's own while it has it, else the same members
`dist.all_reduce_multigpu`, `broadcast_multigpu`,  supported   `multigpu.py`; on every backend and on the CPU, of old
`reduce_multigpu`, `all_gather_multigpu`,                      for nccl alone; with `op`, `group`, `async_op`,
`reduce_scatter_multigpu`                                      `src_tensor`, `dst_tensor`
`init_process_group(…, group_name=…)`              supported   by torch, which ignores it
`init_process_group("tcp", …)`                     different   gloo; the backend "tcp" ended with torch 1.0
`init_process_group("mpi", …)`                     different   Lockstep's group over mpi4py, where torch was built
                                                               without MPI; rank and size are MPI's, as they were
`init_method="file://name"`                        different   in the current folder; torch wants a whole path
`torch.distributed.deprecated`                     different   `torch.distributed` under that name
`torch.nn.parallel.deprecated`                     different   `torch.nn.parallel` under that name
`dist.dist_backend.GLOO`, `dist._backend`          supported   both, for scripts that use one of them
`DataLoader(batch_size=64.0)`, `BatchSampler`      supported   whole numbers; 42.67 is an error (of old, all data in
                                                               one batch)
`Sampler.__init__(data_source)`                    supported   the argument is ignored, as it was
`pred.t().eq(target)[:k].view(-1)`                 supported   2-d results of `Tensor.eq` lie in memory as until torch
                                                               1.6, so that `view` takes them
`StepLR(…, verbose=True)` and other schedulers     different   taken, and nothing is printed
`torch.full((n,), 1)`                              supported   floats, with `--compat` alone, and in the script's own
                                                               code alone: today's code gets whole numbers on purpose
`torch._six`, `torch.cuda.comm`                    supported   the names that they had
`python -m torch.distributed.launch`               supported   `lockstep launch`, in every spelling it ever had
`--local_rank` or `--local-rank`                   supported   passed as the script declares it; `spelling.py`
`DistributedDataParallelCPU`, `Variable`,          supported   by torch
`torch.nn.utils.clip_grad_norm`
`Variable(…, volatile=True)`                       different   torch ignores it: results are right, memory is not
                                                               saved; use `torch.no_grad()`
`dist.get_rank()` before `init_process_group`      refused     torch raises, as it always did
`loss.data[0]`                                     refused     a scalar has no entry 0 since torch 0.5: `loss.item()`
`tensor.cuda(async=True)`                          refused     a keyword of Python since 3.7: `non_blocking=True`
`torch.load` of `args` and numpy numbers           supported   where torch refuses a file for `argparse.Namespace` or
                                                               numpy's arrays and numbers alone: reading them runs no
                                                               code
`torch.load` of other pickled classes              refused     it would run code of the file; `weights_only=False` if
                                                               you trust it
`group=0`                                          refused     an error since torch 1.0: leave it out
`1 - mask`, integer `/`                            refused     torch's arithmetic, which others rely on: `~mask`, `//`
================================================== =========== ========================================================

Importing this imports no torch.

General layout, from the bottom up:

* `sources`: reads a script and its modules.
* `signs`: what one file needs; `needs`: what the whole script needs; `spelling`: how it spells `--local_rank`.
* `choice`: decides which changes a rank makes, or takes the launcher's decision.
* `multigpu`: the `*_multigpu` functions; `patches`: changes torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.compat.legacy.multigpu import all_gather_multigpu as all_gather_multigpu
    from lockstep.compat.legacy.multigpu import all_reduce_multigpu as all_reduce_multigpu
    from lockstep.compat.legacy.multigpu import broadcast_multigpu as broadcast_multigpu
    from lockstep.compat.legacy.multigpu import reduce_multigpu as reduce_multigpu
    from lockstep.compat.legacy.multigpu import reduce_scatter_multigpu as reduce_scatter_multigpu
    from lockstep.compat.legacy.patches import install as install

__all__ = [
    "all_gather_multigpu",
    "all_reduce_multigpu",
    "broadcast_multigpu",
    "install",
    "reduce_multigpu",
    "reduce_scatter_multigpu",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'lockstep.compat.legacy' has no attribute {name!r}")
    where = "patches" if name == "install" else "multigpu"
    value = getattr(importlib.import_module(f"lockstep.compat.legacy.{where}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
