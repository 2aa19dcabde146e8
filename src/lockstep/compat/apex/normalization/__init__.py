"""`apex.normalization`: torch's layers under Apex's names. See the table in `lockstep.compat.apex`."""

from __future__ import annotations

from lockstep.compat.apex.normalization.fused_layer_norm import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]
