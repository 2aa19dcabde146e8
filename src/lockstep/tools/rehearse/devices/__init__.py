"""Simulated GPUs: CUDA, as a script sees it, on the CPU. The docstring of `rehearse` explains the design.

General layout, from the bottom up:

* `marks`: which stand-in a tensor is on; `naming`: which device a name or number refers to.
* `parts`: tensors composed of other tensors; `mode`: passes marks from inputs to results.
* `arithmetic`: rejects operands on different devices.
* `tensors`: replaces the functions that query a tensor's device, move it or create one.
* `cuda`: `torch.cuda`; `memory`: `torch.cuda.memory`; `streams`: streams and events; `amp`: autocast.
* `replicas`: `torch.nn.DataParallel`; `groups`: nccl, as groups over shared memory.
* `sharing`: tensors sent to another process; `files`: tensors in checkpoints.
* `tracing`: programs that torch compiles, exports or traces.
"""

from __future__ import annotations

__all__ = ["install"]


def install(count: int, limit_bytes: int = 0) -> None:
    """Give this process `count` stand-ins, for good. Call it once.

    Args:
        count: number of devices of the simulated node.
        limit_bytes: memory of each device; 0 for no limit.
    """
    import torch

    from lockstep.tools.rehearse.devices import (
        amp,
        arithmetic,
        cuda,
        files,
        groups,
        mode,
        parts,
        replicas,
        sharing,
        tensors,
        tracing,
    )
    from lockstep.tools.rehearse.devices.marks import ledger
    from lockstep.tools.rehearse.devices.naming import devices
    from lockstep.tools.rehearse.patching import replace

    devices.install(count)
    ledger.limit_bytes = limit_bytes
    # First of all, because torch.library and the compiler's entry points read names of torch when they are imported.
    cuda.install()
    tensors.install()
    parts.install()
    amp.install()
    files.install()
    sharing.install()
    replicas.install()
    groups.install()
    mode.install()
    arithmetic.install()
    tracing.install()
    from lockstep.parallel.batchnorm import SyncBatchNorm

    for module in (torch.nn, torch.nn.modules, torch.nn.modules.batchnorm):
        replace(module, "SyncBatchNorm", SyncBatchNorm)
