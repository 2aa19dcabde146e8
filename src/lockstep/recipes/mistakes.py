"""Errors in a recipe's options: raised on every rank, and printed by rank 0 in one line."""

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
    """`lockstep.init`, on GPUs if there is one per rank. Collective.

    Args:
        recipe: name of the recipe.
        backend: the requested backend.
        device: the device to train on; None for that of `choose_device`.
        **arguments: arguments of `lockstep.init`.

    Returns:
        The world, and notes on its device to print. None, on every rank, if the backend is unknown or cannot be used
        with the available GPUs, after rank 0 has printed the error.
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
    """Report an error that every rank has found. Collective."""
    say_mistake(recipe, mistake, rank)
    dist.barrier()  # or a launcher might stop rank 0 before it has printed, because another rank exited


def say_mistake(recipe: str, mistake: Exception, rank: int) -> None:
    """Print an error on rank 0, in one line instead of a traceback per rank. Local."""
    if rank == 0:
        print(f"lockstep train {recipe}: error: {mistake}", file=sys.stderr, flush=True)
