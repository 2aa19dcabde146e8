"""Symmetric memory for scripts: tensors in memory that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.comm.backend import engine_of
from lockstep.errors import InputError, InputTypeError, NotInitialized

__all__ = ["symmetric_empty"]


def symmetric_empty(
    shape: int | Sequence[int], dtype: torch.dtype = torch.float32, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Allocate a zeroed tensor at the same offset of memory shared by the ranks of a host. Collective.

    `dist.all_reduce` of it, or of a contiguous part of it, works in place, without copies.

    Args:
        shape: the same on all ranks.
        dtype: the same on all ranks.
        group: a lockstep group; default the default group.

    Returns:
        A CPU tensor of that shape. Each rank has its own; others access it only through collectives.

    Raises:
        InputError: the group has no symmetric memory, or a size is negative.
        InputTypeError: `shape` is no size or sequence of sizes, or `dtype` no dtype.
        SharedMemoryError: on every rank, if there is not enough memory.
    """
    chosen = group if group is not None else dist.group.WORLD
    if chosen is None:
        raise NotInitialized("symmetric_empty needs a group: call lockstep.init() first")
    engine = engine_of(chosen)
    if engine is None or not engine.team.has_symmetric_memory:
        raise InputError(f"only lockstep groups have symmetric memory; this one is {dist.get_backend(chosen)}")
    if not isinstance(shape, int | list | tuple) or not isinstance(dtype, torch.dtype):
        raise InputTypeError(f"symmetric_empty({shape!r}, {dtype!r}): expected a shape, such as (3, 4), and a dtype")
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(size < 0 for size in sizes):
        raise InputError(f"symmetric_empty({shape!r}): expected sizes of at least 0")
    return engine.symmetric_empty(sizes, dtype)
