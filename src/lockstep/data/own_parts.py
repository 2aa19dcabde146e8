"""Refuses a sampler that gives each rank its own part of the data, and has no attribute that says so.

Those that have one are known by it (`drift/samplers.py`). Of `SubsetRandomSampler(range(rank, n, world_size))` only the
length tells something: a part of the data, of as many parts as there are ranks. A subset that is meant, the same on all
ranks, may have that length too, such as the held-out half of the data on two ranks.

[Note: orders compared in passing] So where an order has that length, each rank leaves a number for it in the store of
the default group, and looks whether its neighbours have left another one. Nobody waits: of two ranks with different
orders the one that comes later sees the other's. Without a store, or where its host is gone, nothing is said.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch.distributed as dist

from lockstep.comm.group_stores import store_of
from lockstep.data.fingerprints import fingerprint_of_order
from lockstep.data.order import Order
from lockstep.errors import DataError, RendezvousError

__all__ = ["check_no_own_part"]

_count = itertools.count()  # of the loaders of this process whose orders were compared


def check_no_own_part(sampler: object, order: Order, num_samples: int, epoch: int, rank: int, world_size: int) -> None:
    """A loader's first order is that of its neighbours, where its length is that of a rank's part.

    Local: it asks a store, and waits for no rank. See [Note: orders compared in passing].

    Args:
        sampler: the user's.
        order: what it gave for the epoch.
        num_samples: in the dataset.
        epoch: its number.
        rank: this rank.
        world_size: number of ranks.

    Raises:
        DataError: a neighbour has another order.
    """
    if world_size == 1 or len(order) not in (num_samples // world_size, -(-num_samples // world_size)):
        return
    key = f"{next(_count)} {epoch} {num_samples}"
    other = _find_other(key, str(fingerprint_of_order(order, 0)), rank, world_size)
    if other is not None:
        raise DataError(
            f"sampler {type(sampler).__name__} gives this rank other indices than rank {other}: {len(order)} of "
            f"{num_samples}, as many as each of {world_size} ranks has of them. The loader splits the global order by "
            "itself, so each rank would see a part of its part. Drop the sampler and pass shuffle=True or False, and "
            "the global batch_size. If a subset is meant, choose the same one on all ranks"
        )


def _find_other(key: str, own: str, rank: int, world_size: int) -> int | None:
    """Leave a number for the neighbours; the rank of one that has left another, if any has. Local."""
    group: Any = dist.group.WORLD if dist.is_available() else None
    if group is None or (group.rank(), group.size()) != (rank, world_size):
        return None
    try:
        store = store_of(group, "orders")
        if store is None:
            return None
        store.set(f"{key} of rank {rank}", own)
        for other in ((rank - 1) % world_size, (rank + 1) % world_size):
            if store.find(f"{key} of rank {other}") not in (None, own):
                return other
    except (RuntimeError, AttributeError, ValueError, RendezvousError):
        return None  # the rank that holds the store has taken it along
    return None
