"""`apex.contrib.optimizers`: the `FP16_Optimizer` of `apex.optimizers`, which Apex moved here in 2019.

The deprecated `FusedAdam`, `FusedLAMB` and `FusedSGD`, whose steps took gradients as arguments, are not supported.
"""

from __future__ import annotations

from typing import Any

from lockstep.compat.apex.fp16_utils.fp16_optimizer import FP16_Optimizer

__all__ = ["FP16_Optimizer"]

_ELSEWHERE = ("FusedAdam", "FusedLAMB", "FusedSGD")


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        raise ImportError(
            f"apex.contrib.optimizers.{name} is not supported by lockstep.compat.apex; use apex.optimizers.{name}"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
