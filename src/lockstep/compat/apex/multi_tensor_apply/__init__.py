"""`apex.multi_tensor_apply`: can be imported, as in an Apex built without CUDA extensions."""

from __future__ import annotations

from lockstep.compat.apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

multi_tensor_applier = MultiTensorApply(2048 * 32)
