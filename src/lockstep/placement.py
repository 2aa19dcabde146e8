"""Which ranks share a host, where no launcher says so: the ranks tell each other where they are. Collective.

`RANK` and `WORLD_SIZE` alone, set by hand or by what starts one container for each rank, leave open how many ranks are
on a host, and so which GPU is whose. Two ranks are on one host if they run on the same kernel and see each other's
process ids, or the same GPUs. Containers of one machine that share neither are two hosts, each with GPUs of its own.
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
    """The topology of this rank, with what nobody had said of it. Collective.

    Args:
        topology: as the environment has it.
        store: that the ranks share.
        timeout: until a rank that does not tell where it is is an error.
        gpus: see `describe_own_host`.

    Raises:
        RendezvousError: a rank did not tell.
    """
    exchange = BootstrapStore(PrefixStore("placement", store), "placement")
    own = describe_own_host(gpus)
    try:
        if not topology.unsaid:  # others may have been told less
            exchange.set(f"rank{topology.rank}", own)
            return topology
        told = exchange.share("rank", topology.rank, topology.world_size, own, timeout.total_seconds())
        why = "" if told is not None else f" within {timeout.total_seconds():g} s"
    except RendezvousError:
        raise
    except RuntimeError as error:  # the store is gone
        told, why = None, f": {str(error).splitlines()[0]}"
    if told is None:
        raise RendezvousError(
            f"rank {topology.rank} of {topology.world_size} did not learn from the others which of them share its "
            f"host{why}"
        )
    return place(topology, told)


def describe_own_host(gpus: Sequence[str] = ()) -> str:
    """What this rank tells the others of where it is. Local.

    Args:
        gpus: what tells the GPUs that this process sees from all others.
    """
    try:
        host = [boot_id(), str(pid_namespace())]
    except OSError:  # a system without /proc
        host = [os.uname().nodename, ""]
    return json.dumps([*host, *gpus])


def place(topology: Topology, descriptions: Sequence[str]) -> Topology:
    """The topology with what nobody had said, from what each rank tells of its host; what was said stays.

    Args:
        topology: of this rank.
        descriptions: what `describe_own_host` gave each rank, in order.
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
    # What was said of the one may leave no room for what was found of the other.
    values["local_world_size"] = max(values["local_world_size"], values["local_rank"] + 1)
    values["num_nodes"] = max(values["num_nodes"], values["node_rank"] + 1)
    return dataclasses.replace(topology, **values)


def _share_host(one: list[str], other: list[str]) -> bool:
    boot_id, processes, *gpus = one
    return boot_id == other[0] and (processes == other[1] or (bool(gpus) and gpus == other[2:]))
