"""Options of a recipe that cannot be used: every rank has found that, and rank 0 says it, in one line."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

import lockstep
from lockstep.errors import BackendUnavailable
from lockstep.world import World

__all__ = ["open_world", "say_mistake", "say_together"]


def open_world(recipe: str, backend: str, **arguments: Any) -> World | None:
    """`lockstep.init`. Collective.

    Args:
        recipe: its name.
        backend: as it was asked for.
        **arguments: of `lockstep.init`.

    Returns:
        None, on every rank, where there is no such backend, which rank 0 has then said.
    """
    try:
        return lockstep.init(backend, **arguments)
    except BackendUnavailable as mistake:
        with lockstep.init("auto", **(arguments | {"device": "cpu"})) as world:
            say_together(recipe, mistake, world.rank)
        return None


def say_together(recipe: str, mistake: Exception, rank: int) -> None:
    """Say a mistake that every rank has found. Collective."""
    say_mistake(recipe, mistake, rank)
    dist.barrier()  # or a launcher that sees another rank end first might end rank 0 before it has spoken


def say_mistake(recipe: str, mistake: Exception, rank: int) -> None:
    """Say a mistake, by rank 0. One line says more than a traceback of each. Local."""
    if rank == 0:
        print(f"lockstep train {recipe}: error: {mistake}", file=sys.stderr, flush=True)
