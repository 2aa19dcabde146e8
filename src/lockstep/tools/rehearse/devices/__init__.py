"""GPUs that are not there: what a script sees of CUDA, on the CPU. See the package's docstring for why this way.

General layout, from the bottom up:

* `marks`: which stand-in a tensor lies on; `naming`: which device a word means.
* `parts`: tensors that are made of others; `mode`: hands marks from inputs to results.
* `arithmetic`: refuses operands on two devices.
* `tensors`: replaces the calls that ask where a tensor lies, move it or make one.
* `cuda`: `torch.cuda`; `memory`: `torch.cuda.memory`; `streams`: streams and events; `amp`: autocast.
* `replicas`: `torch.nn.DataParallel`; `groups`: nccl, as groups over shared memory.
* `sharing`: tensors that go to another process; `files`: tensors in checkpoints.
* `tracing`: programs that torch records instead of running.
"""

from __future__ import annotations

__all__ = ["install"]


def install(count: int, limit_bytes: int = 0) -> None:
    """Give this process `count` stand-ins. For the whole process, once.

    Args:
        count: devices that its node has.
        limit_bytes: memory of each; 0 for no limit.
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
    # torch.library and the compiler's entry points read names of torch when they are imported, so first of all.
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
