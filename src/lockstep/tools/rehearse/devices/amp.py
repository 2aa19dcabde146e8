"""Mixed precision: `autocast("cuda")` is autocast on the CPU, with CUDA's default of float16.

torch keeps one list of operators to cast for each device type. The CPU's is a little different from CUDA's, so
single operators may compute in another precision than on the GPU; which tensors are half and what overflows is much
the same, and GradScaler runs its own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep.tools.rehearse.patching import wrap

__all__ = ["install"]


def _autocast_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
            if dtype not in (torch.float16, torch.bfloat16):
                enabled = False
        original(self, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    return init


def _for_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """A question about CUDA's autocast, asked about the CPU's."""

    def ask(device_type: str = "cuda", *args: Any) -> Any:
        return original("cpu" if device_type == "cuda" else device_type, *args)

    return ask


def install() -> None:
    """Point autocast for CUDA to the CPU's."""
    wrap(torch.amp.autocast_mode.autocast, "__init__", _autocast_init)
    wrap(torch, "is_autocast_enabled", _for_cpu)
