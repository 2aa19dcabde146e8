"""Where an Apex that was built with its kernels has `SyncBatchNorm`: the same class as in `sync_batchnorm`."""

from __future__ import annotations

from lockstep.compat.apex.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
