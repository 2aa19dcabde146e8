"""`apex.contrib`: `optimizers.FP16_Optimizer`, which scripts of 2019 import from there, and nothing else.

General layout:

* `optimizers`: `FP16_Optimizer`.
"""

from __future__ import annotations

import importlib
from typing import Any

from lockstep.compat.apex import REFUSED

__all__ = ["optimizers"]


def __getattr__(name: str) -> Any:
    if name == "optimizers":
        return importlib.import_module(f"{__name__}.optimizers")
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    advice = REFUSED.get(f"contrib.{name}", REFUSED["contrib"])
    raise ImportError(f"apex.contrib.{name} is not supported by lockstep.compat.apex; {advice}")
