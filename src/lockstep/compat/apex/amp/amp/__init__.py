"""`apex.amp.amp`: Apex's module of decorators and `init`."""

from __future__ import annotations

from lockstep.compat.apex.amp.casts import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from lockstep.compat.apex.amp.legacy import init

__all__ = [
    "float_function",
    "half_function",
    "init",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]
