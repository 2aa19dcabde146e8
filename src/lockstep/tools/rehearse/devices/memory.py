"""`torch.cuda.memory` on stand-ins: the figures of the ledger in `marks`, under the names of CUDA's allocator.

There is no caching allocator, so reserved, allocated and active memory are equal, and every block counts as large.
As with CUDA, statistics are zero before CUDA is first used, and reading them does not count as using it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from lockstep.tools.rehearse.devices.marks import Tally, Usage, ledger
from lockstep.tools.rehearse.devices.naming import devices
from lockstep.tools.rehearse.patching import replace, wrap

__all__ = ["info", "install", "total_bytes"]

# Memory reported for a device without a limit; enough for scripts that check it first.
_TOTAL_BYTES = 80 * 1024**3
_POOLS = ("all", "large_pool", "small_pool")
_OF_BYTES = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
_OF_BLOCKS = ("allocation", "segment", "active")
_EMPTY = ("inactive_split", "inactive_split_bytes")
_NEVER = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")


def total_bytes() -> int:
    """Memory of each device, in bytes."""
    return ledger.limit_bytes or _TOTAL_BYTES


def _usage(device: Any) -> Usage:
    return ledger.of(devices.cuda_index(device)) if devices.is_used else Usage()


def info(device: Any = None) -> tuple[int, int]:
    """`torch.cuda.mem_get_info`: free and total bytes of a device."""
    used = ledger.of(devices.cuda_index(device)).num_bytes.now
    return max(0, total_bytes() - used), total_bytes()


def _figures(tally: Tally) -> dict[str, int]:
    return {
        "current": tally.now,
        "peak": tally.peak,
        "allocated": tally.ever,
        "freed": tally.ever - tally.now,
    }


def _nested_stats(device: Any = None) -> dict[str, Any]:
    """`memory_stats_as_nested_dict`, from which torch computes `memory_stats`."""
    if not devices.is_used:
        return {}
    usage, nothing = _usage(device), _figures(Tally())

    def in_pools(tally: Tally) -> dict[str, dict[str, int]]:
        return {pool: nothing if pool == "small_pool" else _figures(tally) for pool in _POOLS}

    return {
        **{name: in_pools(usage.num_bytes) for name in _OF_BYTES},
        **{name: in_pools(usage.blocks) for name in _OF_BLOCKS},
        **{name: in_pools(Tally()) for name in _EMPTY},
        **dict.fromkeys(("oversize_allocations", "oversize_segments"), nothing),
        **dict.fromkeys(_NEVER, 0),
        "max_split_size": -1,
    }


def _summary(device: Any = None, abbreviated: bool = False) -> str:
    tally = _usage(device).num_bytes
    return f"cuda (stand-in): {tally.now} bytes in use, at most {tally.peak}"


def _reset_peak(device: Any = None) -> None:
    if devices.is_used:
        ledger.reset_peak(devices.cuda_index(device))


def _reset_total(device: Any = None) -> None:
    if devices.is_used:
        ledger.reset_total(devices.cuda_index(device))


def _now(device: Any = None) -> int:
    return _usage(device).num_bytes.now


def _peak(device: Any = None) -> int:
    return _usage(device).num_bytes.peak


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for functions that only concern the allocator."""


def _names() -> dict[str, Any]:
    return {
        **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached", "device_memory_used"), _now),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), _peak),
        **dict.fromkeys(
            ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), _reset_peak
        ),
        "reset_accumulated_memory_stats": _reset_total,
        "memory_stats_as_nested_dict": _nested_stats,
        "memory_summary": _summary,
        "memory_snapshot": lambda *args, **kwargs: [],
        "mem_get_info": info,
        "empty_cache": _nothing,
        "set_per_process_memory_fraction": _nothing,
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "get_allocator_backend": lambda: "native",
        "_record_memory_history": _nothing,
        "_snapshot": lambda *args, **kwargs: {"segments": [], "device_traces": []},
    }


def _resize(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps count when a storage is resized, which is how FSDP frees and reallocates gathered parameters."""

    def resize(self: Any, num_bytes: int) -> Any:
        ledger.resize(self, int(num_bytes))
        return original(self, num_bytes)

    return resize


def install() -> None:
    """Replace the functions of `torch.cuda.memory`, and their counterparts in `torch.accelerator` if torch has them."""
    names = _names()
    for name, value in names.items():
        replace(torch.cuda.memory, name, value)
        if not name.startswith("_"):
            replace(torch.cuda, name, value)
    shared = {**names, "memory_stats": torch.cuda.memory_stats, "get_memory_info": info}
    for module in (torch.accelerator, sys.modules.get("torch.accelerator.memory")):
        for name, value in shared.items():
            if hasattr(module, name):
                replace(module, name, value)
    wrap(torch.UntypedStorage, "resize_", _resize)
