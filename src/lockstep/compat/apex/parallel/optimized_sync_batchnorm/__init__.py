"""The module of `SyncBatchNorm` in an Apex built with kernels; the same class as in `sync_batchnorm`."""

from __future__ import annotations

from lockstep.compat.apex.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
