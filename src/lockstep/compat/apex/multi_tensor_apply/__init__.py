"""`apex.multi_tensor_apply`: there to be imported, as in an Apex built without its CUDA extensions."""

from __future__ import annotations

from lockstep.compat.apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

multi_tensor_applier = MultiTensorApply(2048 * 32)
