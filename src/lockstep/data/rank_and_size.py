"""Which rank this is, and of how many."""

from __future__ import annotations

import torch.distributed as dist

from lockstep import env, log
from lockstep.data.checks import check_integer
from lockstep.errors import DataError
from lockstep.world import current_world

__all__ = ["check_rank_and_size", "find_rank_and_size"]


def check_rank_and_size(rank: object, world_size: object) -> tuple[int, int] | None:
    """Explicit rank and world size; None where neither was given."""
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise DataError(f"{given} was given without {missing}: give both, or neither to use the open world")
    size = check_integer("world_size", world_size, 1)
    number = check_integer("rank", rank, 0)
    if number >= size:
        raise DataError(f"rank is {number}, but world_size is {size}: expected 0 … {size - 1}")
    return number, size


def find_rank_and_size() -> tuple[int, int]:
    """Rank and world size of the open world, else of torch's default group, else of one process."""
    world = current_world()
    if world is not None:
        return world.rank, world.world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launched = env.WORLD_SIZE.get()
    if launched is not None and launched > 1:
        log.warn_once(
            log.get_logger(__name__),
            f"DataLoader: WORLD_SIZE is {launched}, but no process group is open, so this process reads all the data "
            "by itself. Call lockstep.init() before iterating, or pass rank and world_size",
        )
    return 0, 1
