"""Keeps glibc from giving the memory of gradients back to the kernel in every step.

[Note: gradients on the heap] Autograd allocates the gradients of a step, and `zero_grad` frees them. glibc has large
pieces mapped by the kernel anew each time, or trims its heap when there is much to trim, and every page that comes
back costs a fault: for a model of 10M parameters four thousand in a step, a tenth of its time. So glibc is told to keep
what two steps' gradients take. That much more may stay with the process when the model is gone. An older glibc refuses
a threshold of more than 32 MiB, and gets that; larger pieces are then mapped anew in every step, as by default.

Settings of the user win: MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_, or glibc.malloc in GLIBC_TUNABLES. Other
allocators are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from lockstep import env, libc

__all__ = ["keep_memory_of_gradients"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# What glibc itself goes up to; and where a piece is so large that its faults do not matter.
_SMALLEST_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD = 32 << 20, 1 << 30
# What glibc of some years ago accepts: half of one of its heaps.
_OLD_LARGEST_MMAP_THRESHOLD = 32 << 20
_SLACK_BYTES = 1 << 20
_LARGEST_INT = 2**31 - 1

_mallopt: Callable[[int, int], int] | None = libc.function("mallopt")
_told = (0, 0)


def keep_memory_of_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Have the memory of these parameters' gradients stay with the process between steps. Local.

    Args:
        parameters: of a model to be trained; those not on the CPU do not count.
    """
    global _told
    sizes = [one.numel() * one.element_size() for one in parameters if one.device.type == "cpu"]
    if not sizes or _mallopt is None or _is_decided():
        return
    piece_bytes = min(max(*sizes, _SMALLEST_MMAP_THRESHOLD) + _SLACK_BYTES, _LARGEST_MMAP_THRESHOLD)
    kept_bytes = min(2 * sum(sizes) + piece_bytes, _LARGEST_INT)
    wanted = max(piece_bytes, _told[0]), max(kept_bytes, _told[1])
    if wanted != _told:
        _told = wanted
        is_accepted = any(_mallopt(_M_MMAP_THRESHOLD, one) for one in (wanted[0], _OLD_LARGEST_MMAP_THRESHOLD))
        # A trim threshold alone would freeze the other one where it stands, at 128 KiB: worse than saying nothing.
        if is_accepted:
            _mallopt(_M_TRIM_THRESHOLD, wanted[1])


def _is_decided() -> bool:
    said = (env.MALLOC_MMAP_THRESHOLD_.get(), env.MALLOC_TRIM_THRESHOLD_.get())
    return any(one is not None for one in said) or "glibc.malloc." in (env.GLIBC_TUNABLES.get() or "")
