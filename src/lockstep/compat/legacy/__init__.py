"""Restores what scripts of 2018 to 2021 expect of torch and current releases lack.

`install()` makes all changes, `install(names)` some. Ranks of `lockstep run`, `lockstep launch` and
`lockstep horovodrun`, and scripts with `import lockstep.compat.install`, get the changes that their source needs
(`needs.py`) once torch is imported; `--compat` makes all, `--no-compat` none. Names that torch has are left alone,
except for calls in the table that torch rejects. `lockstep launch` has the command line of
`torch.distributed.launch`.

================================================== =========== ========================================================
what old scripts use                               here        how
================================================== =========== ========================================================
`dist.reduce_op.SUM`, …                            supported   torch's own if it has it, otherwise the same members
`dist.all_reduce_multigpu`, `broadcast_multigpu`,  supported   `multigpu.py`; on every backend and on the CPU, not
`reduce_multigpu`, `all_gather_multigpu`,                      only nccl; with `op`, `group`, `async_op`,
`reduce_scatter_multigpu`                                      `src_tensor`, `dst_tensor`
`init_process_group(…, group_name=…)`              supported   by torch, which ignores it
`init_process_group("tcp", …)`                     different   gloo; the backend "tcp" was removed in torch 1.0
`init_process_group("mpi", …)`                     different   Lockstep's group over mpi4py, if torch was built
                                                               without MPI; rank and size are MPI's, as before
`init_method="file://name"`                        different   in the current folder; torch needs a full path
`torch.distributed.deprecated`                     different   `torch.distributed` under that name
`torch.nn.parallel.deprecated`                     different   `torch.nn.parallel` under that name
`dist.dist_backend.GLOO`, `dist._backend`          supported   both, for scripts that use one of them
`DataLoader(batch_size=64.0)`, `BatchSampler`      supported   whole numbers; 42.67 is an error (before, all data in
                                                               one batch)
`Sampler.__init__(data_source)`                    supported   the argument is ignored, as before
`pred.t().eq(target)[:k].view(-1)`                 supported   2-d results of `Tensor.eq` have the strides of torch
                                                               1.6, so that `view` works
`StepLR(…, verbose=True)` and other schedulers     different   accepted; nothing is printed
`torch.full((n,), 1)`                              supported   floats, only with `--compat`, and only in the script's
                                                               own code: current code expects integers
`torch._six`, `torch.cuda.comm`                    supported   their names
`python -m torch.distributed.launch`               supported   `lockstep launch`, in every spelling
`--local_rank` or `--local-rank`                   supported   passed as the script expects it; `spelling.py`
`DistributedDataParallelCPU`, `Variable`,          supported   by torch
`torch.nn.utils.clip_grad_norm`
`Variable(…, volatile=True)`                       different   ignored by torch: results are right, memory is not
                                                               saved; use `torch.no_grad()`
`dist.get_rank()` before `init_process_group`      refused     torch raises, as it always did
`loss.data[0]`                                     refused     a scalar has no element 0 since torch 0.5: `loss.item()`
`tensor.cuda(async=True)`                          refused     a keyword since Python 3.7: `non_blocking=True`
`torch.load` of `args` and numpy numbers           supported   if torch rejects a file only for `argparse.Namespace` or
                                                               numpy's arrays and numbers: reading them runs no
                                                               code
`torch.load` of other pickled classes              refused     it would run code from the file; `weights_only=False` if
                                                               you trust it
`group=0`                                          refused     an error since torch 1.0: leave it out
`1 - mask`, integer `/`                            refused     other code relies on torch's arithmetic: `~mask`, `//`
================================================== =========== ========================================================

Importing this does not import torch.

General layout, from the bottom up:

* `sources`: parses a script and its modules.
* `signs`: the changes that a file needs; `needs`: those of the whole script; `spelling`: how it spells `--local_rank`.
* `choice`: decides which changes a rank makes, or reads the launcher's decision.
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
