"""Options of a recipe that cannot be used: every rank has found that, and rank 0 says it, in one line."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from lockstep import env
from lockstep.errors import BackendUnavailable, InputError
from lockstep.recipes.devices import choose_device
from lockstep.topology import read_topology
from lockstep.world import World

__all__ = ["open_world", "say_mistake", "say_together"]


def open_world(recipe: str, backend: str, device: str | None, **arguments: Any) -> tuple[World, list[str]] | None:
    """`lockstep.init`, on GPUs where there is one for each rank. Collective.

    Args:
        recipe: its name.
        backend: as it was asked for.
        device: where to train; None for what `choose_device` says.
        **arguments: of `lockstep.init`.

    Returns:
        The world, and what a person should know of its device. None, on every rank, where there is no such backend, or
        it cannot be used with the GPUs that there are, which rank 0 has then said.
    """
    notes: list[str] = []
    try:
        if device is None and torch.cuda.is_available():
            place = {name: arguments.get(name) for name in ("rank", "world_size")}
            device, notes = choose_device(backend, read_topology(env.snapshot(), **place))
        return lockstep.init(backend, device=device, **arguments), notes
    except (BackendUnavailable, InputError) as mistake:
        with lockstep.init("auto", device="cpu", **arguments) as world:
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
