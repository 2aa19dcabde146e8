"""Tensors in memory that the ranks of a host share, as a script asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.comm.backend import engine_of
from lockstep.errors import InputError, NotInitialized

__all__ = ["symmetric_empty"]


def symmetric_empty(
    shape: int | Sequence[int], dtype: torch.dtype = torch.float32, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """A zeroed tensor in memory that all ranks of a host share, at the same offset on each. Collective.

    `dist.all_reduce` of it, or of a contiguous part of it, works in place: nothing is copied in or out.

    Args:
        shape: the same on all ranks.
        dtype: the same on all ranks.
        group: a lockstep group; default the default group.

    Returns:
        A CPU tensor of that shape. It is this rank's own: others see it only through collectives.

    Raises:
        InputError: the group has no symmetric memory.
        SharedMemoryError: not enough memory; on every rank.
    """
    chosen = group if group is not None else dist.group.WORLD
    if chosen is None:
        raise NotInitialized("symmetric_empty needs a group: call lockstep.init() first")
    engine = engine_of(chosen)
    if engine is None or not engine.team.has_symmetric_memory:
        raise InputError(f"only lockstep groups have symmetric memory; this one is {dist.get_backend(chosen)}")
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    return engine.symmetric_empty(sizes, dtype)
