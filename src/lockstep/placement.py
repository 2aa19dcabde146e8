"""Finds which ranks share a host if no launcher says so, by exchanging descriptions of their hosts.

With `RANK` and `WORLD_SIZE` alone, set by hand or by whatever starts a container per rank, it is unknown how many ranks
are on a host, and so which GPU belongs to which rank. Two ranks are on one host if they run on the same kernel and see
each other's process ids, or the same GPUs. Containers of one machine that share neither count as two hosts.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from lockstep.comm.group_setup import BootstrapStore
from lockstep.errors import RendezvousError
from lockstep.shm.liveness import pid_namespace
from lockstep.shm.segment import boot_id
from lockstep.topology import Topology
from lockstep.torch_private.stores import PrefixStore, Store

__all__ = ["describe_own_host", "place", "place_by_exchange"]


def place_by_exchange(topology: Topology, store: Store, timeout: timedelta, gpus: Sequence[str] = ()) -> Topology:
    """The topology of this rank, with unknown values filled in. Collective.

    Args:
        topology: the topology according to the environment.
        store: a store shared by the ranks.
        timeout: how long to wait for the other ranks' descriptions.
        gpus: see `describe_own_host`.

    Raises:
        RendezvousError: not all ranks described their hosts in time, or the store failed.
    """
    exchange = BootstrapStore(PrefixStore("placement", store), "placement")
    own = describe_own_host(gpus)
    try:
        if not topology.unsaid:  # other ranks may know less
            exchange.set(f"rank{topology.rank}", own)
            return topology
        told = exchange.share("rank", topology.rank, topology.world_size, own, timeout.total_seconds())
        why = "" if told is not None else f" within {timeout.total_seconds():g} s"
    except RendezvousError:
        raise
    except RuntimeError as error:  # the store failed
        told, why = None, f": {str(error).splitlines()[0]}"
    if told is None:
        raise RendezvousError(
            f"rank {topology.rank} of {topology.world_size} did not learn from the others which of them share its "
            f"host{why}"
        )
    return place(topology, told)


def describe_own_host(gpus: Sequence[str] = ()) -> str:
    """This rank's description of its host, for the other ranks. Local.

    Args:
        gpus: unique identifiers of the GPUs that this process sees.
    """
    try:
        host = [boot_id(), str(pid_namespace())]
    except OSError:  # a system without /proc
        host = [os.uname().nodename, ""]
    return json.dumps([*host, *gpus])


def place(topology: Topology, descriptions: Sequence[str]) -> Topology:
    """The topology with unknown values filled in from the descriptions of all hosts; known values are kept.

    Args:
        topology: the topology of this rank.
        descriptions: what `describe_own_host` returned on each rank, in order of ranks.
    """
    hosts: list[list[int]] = []
    told = [json.loads(text) for text in descriptions]
    for rank, own in enumerate(told):
        host = next((ranks for ranks in hosts if any(_share_host(own, told[other]) for other in ranks)), None)
        if host is None:
            hosts.append(host := [])
        host.append(rank)
    node_rank, here = next((number, ranks) for number, ranks in enumerate(hosts) if topology.rank in ranks)
    found = {
        "local_rank": here.index(topology.rank),
        "local_world_size": len(here),
        "node_rank": node_rank,
        "num_nodes": len(hosts),
    }
    values: dict[str, Any] = {
        name: found[name] if name in topology.unsaid else getattr(topology, name) for name in found
    }
    # A known value may contradict one that was found.
    values["local_world_size"] = max(values["local_world_size"], values["local_rank"] + 1)
    values["num_nodes"] = max(values["num_nodes"], values["node_rank"] + 1)
    return dataclasses.replace(topology, **values)


def _share_host(one: list[str], other: list[str]) -> bool:
    boot_id, processes, *gpus = one
    return boot_id == other[0] and (processes == other[1] or (bool(gpus) and gpus == other[2:]))
