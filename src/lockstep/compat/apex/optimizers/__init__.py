"""`apex.optimizers`: torch's own under Apex's names, and LAMB. See the table in `lockstep.compat.apex`."""

from __future__ import annotations

from typing import Any

from lockstep.compat.apex.fp16_utils.fp16_optimizer import FP16_Optimizer
from lockstep.compat.apex.optimizers.fused import FusedAdagrad, FusedAdam, FusedLAMB, FusedSGD

__all__ = ["FP16_Optimizer", "FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedSGD"]

_REFUSED = {
    "FusedMixedPrecisionLamb": "use FusedLAMB with amp.initialize(opt_level='O2')",
    "FusedNovoGrad": "use FusedLAMB or torch.optim.AdamW",
}


def __getattr__(name: str) -> Any:
    if name in _REFUSED:
        raise ImportError(f"apex.optimizers.{name} is not supported by lockstep.compat.apex; {_REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
