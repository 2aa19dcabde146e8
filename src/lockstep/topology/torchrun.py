"""`RANK`, `WORLD_SIZE` and related variables: set by our launcher, by torchrun, or by hand."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep import env
from lockstep.errors import SetupError
from lockstep.topology.topology import Topology

__all__ = ["read_torchrun"]


def read_torchrun(variables: Mapping[str, str]) -> Topology | None:
    """The topology from `RANK` and `WORLD_SIZE`, as set by our launcher, torchrun and hand-written scripts.

    Without `LOCAL_WORLD_SIZE` it is unknown which ranks are on this host, and the result contains a guess, marked as
    such (`Topology.unsaid`): all are here, which is how people start two processes by hand, unless a `LOCAL_RANK` other
    than `RANK` proves otherwise. `WORLD_SIZE` alone gives no rank: batch scripts export it and leave the rank to the
    launcher; `read_topology` checks that it is correct.
    """
    rank, world_size = env.RANK.get(variables), env.WORLD_SIZE.get(variables)
    if rank is None:
        return None
    if world_size is None:
        raise SetupError("RANK is set but WORLD_SIZE is not: a launcher sets both; unset both for one process")
    local_rank, local_world_size = env.LOCAL_RANK.get(variables), env.LOCAL_WORLD_SIZE.get(variables)
    node_rank = env.GROUP_RANK.get(variables)
    num_nodes = env.GROUP_WORLD_SIZE.get(variables) if node_rank is not None else None
    if node_rank is None:
        node_rank = env.NODE_RANK.get(variables)
    said = {"local_rank": local_rank, "node_rank": node_rank, "num_nodes": num_nodes}
    unsaid: tuple[str, ...] = ()
    if local_world_size is None:
        unsaid = ("local_world_size", *(name for name, value in said.items() if value is None))
        local_world_size = _guess_local_world_size(rank, world_size, local_rank, node_rank)
    ranks_per_host = max(local_world_size, 1)  # Topology itself refuses a size below 1
    if local_rank is None:
        local_rank = rank % ranks_per_host
    if node_rank is None:
        node_rank = rank // ranks_per_host
    if num_nodes is None:  # a guess, because hosts may have different numbers of ranks
        num_nodes = max(node_rank + 1, -(-world_size // ranks_per_host))
    if env.LOCKSTEP_RENDEZVOUS.get(variables) is not None:
        launcher = "lockstep"
    elif env.TORCHELASTIC_RUN_ID.get(variables) is not None:
        launcher = "torchrun"
    else:
        launcher = "environment"
    return Topology(rank, world_size, local_rank, local_world_size, node_rank, num_nodes, launcher, unsaid=unsaid)


def _guess_local_world_size(rank: int, world_size: int, local_rank: int | None, node_rank: int | None) -> int:
    """The number of ranks on this host, assuming that ranks are counted host by host, with equal numbers on each."""
    before = rank - (rank if local_rank is None else local_rank)  # ranks of the hosts before this one
    if local_rank is None or before <= 0:
        return world_size
    return min(max(before // max(node_rank or 1, 1), local_rank + 1), world_size)
