"""Mixed precision: autocast for CUDA casts tensors on the CPU, separately from autocast for the CPU.

torch keeps a switch and a dtype per device type and thread. Those of CUDA are left alone, so code that reads or
restores them (`torch.autocast`, checkpoints, `custom_fwd`, Apex) works as usual. The operators run on CPU tensors,
however, and cast by the CPU's switch: it is on if either should be. What the script requested for the CPU itself is
kept here. Which operators cast, and to what, is then decided by the device that a tensor reports
(`lockstep.torch_private.cuda_casts`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from lockstep.tools.rehearse.patching import replace
from lockstep.torch_private.cuda_casts import CudaCasts

__all__ = [
    "get_autocast_dtype",
    "install",
    "is_autocast_enabled",
    "set_autocast_dtype",
    "set_autocast_enabled",
]

_is_enabled, _enable = torch.is_autocast_enabled, torch.set_autocast_enabled
_dtype_of, _set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype


class _OfCpu(threading.local):
    """Autocast settings that a script requested for the CPU itself, in this thread."""

    def __init__(self) -> None:
        self.enabled, self.dtype = _is_enabled("cpu"), _dtype_of("cpu")


_of_cpu = _OfCpu()


def _apply() -> None:
    """Set torch's switch for the CPU: on if the script enabled autocast for CUDA or for the CPU."""
    of_cuda = _is_enabled("cuda")
    _enable("cpu", of_cuda or _of_cpu.enabled)
    _set_dtype("cpu", _dtype_of("cuda") if of_cuda else _of_cpu.dtype)


def is_autocast_enabled(device_type: str = "cuda") -> bool:
    """`torch.is_autocast_enabled`."""
    return _of_cpu.enabled if device_type == "cpu" else _is_enabled(device_type)


def set_autocast_enabled(device_type: str | bool, enabled: bool | None = None) -> None:
    """`torch.set_autocast_enabled`; without a device type, for CUDA."""
    if isinstance(device_type, bool) or enabled is None:
        kind, enabled = "cuda", bool(device_type)
    else:
        kind = device_type
    if kind == "cpu":
        _of_cpu.enabled = enabled
    else:
        _enable(kind, enabled)
    _apply()


def get_autocast_dtype(device_type: str) -> torch.dtype:
    """`torch.get_autocast_dtype`."""
    return _of_cpu.dtype if device_type == "cpu" else _dtype_of(device_type)


def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
    """`torch.set_autocast_dtype`."""
    if device_type == "cpu":
        _of_cpu.dtype = dtype
    else:
        _set_dtype(device_type, dtype)
    _apply()


def _of(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """One of torch's older functions for a single device type."""
    return lambda *value: function(device_type, *value)


def install() -> None:
    """Replace torch's functions by these, and cast tensors on stand-ins by CUDA's list of operators."""
    CudaCasts(everywhere=False)
    for function in (is_autocast_enabled, set_autocast_enabled, get_autocast_dtype, set_autocast_dtype):
        replace(torch, function.__name__, function)
    for device_type, name in (("cpu", "cpu"), ("cuda", "gpu")):
        replace(torch, f"get_autocast_{name}_dtype", _of(get_autocast_dtype, device_type))
        replace(torch, f"set_autocast_{name}_dtype", _of(set_autocast_dtype, device_type))
    replace(torch, "is_autocast_cpu_enabled", _of(is_autocast_enabled, "cpu"))
    replace(torch, "set_autocast_cpu_enabled", _of(set_autocast_enabled, "cpu"))
