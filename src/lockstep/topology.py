"""Who am I among whom: rank and world size, read from the launcher's environment.

Pure functions over a mapping of environment variables, so every launcher's form can be
tested without that launcher. A reader per launcher recognises its own variables and
returns a `Topology` or None; the first that recognises them wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep import env
from lockstep.errors import SetupError

__all__ = ["Topology", "read_topology"]


@dataclass(frozen=True)
class Topology:
    """Where one process stands in a job.

    Attributes:
        rank: global rank, 0 … world_size-1.
        world_size: number of ranks over all hosts.
        local_rank: rank among the processes of this host.
        local_world_size: number of ranks on this host.
        node_rank: number of this host.
        num_nodes: number of hosts.
        launcher: who started this process: "lockstep", "torchrun", "environment" or "single".
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = 0
    num_nodes: int = 1
    launcher: str = "single"

    def __post_init__(self) -> None:
        for name, value, size_name, size in (
            ("rank", self.rank, "world_size", self.world_size),
            ("local_rank", self.local_rank, "local_world_size", self.local_world_size),
            ("node_rank", self.node_rank, "num_nodes", self.num_nodes),
        ):
            if size < 1:
                raise SetupError(f"{size_name} is {size}; it must be at least 1")
            if not 0 <= value < size:
                raise SetupError(f"{name} is {value}, but {size_name} is {size}: expected 0 … {size - 1}")
        if self.local_world_size > self.world_size:
            raise SetupError(f"local_world_size is {self.local_world_size}, more than world_size {self.world_size}")


def _read_torchrun_form(variables: Mapping[str, str]) -> Topology | None:
    """`RANK` and `WORLD_SIZE`, as our launcher, torchrun and hand-written scripts set them.

    Without `LOCAL_RANK` and `LOCAL_WORLD_SIZE` all ranks are taken to be on this host,
    which is how people start two processes by hand.
    """
    rank, world_size = env.RANK.get(variables), env.WORLD_SIZE.get(variables)
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        there, missing = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
        raise SetupError(f"{there} is set but {missing} is not: a launcher sets both; unset both for one process")
    local_rank, local_world_size = env.LOCAL_RANK.get(variables), env.LOCAL_WORLD_SIZE.get(variables)
    node_rank = env.GROUP_RANK.get(variables)
    if node_rank is None:
        node_rank = env.NODE_RANK.get(variables)
    if local_world_size is None:
        local_world_size = world_size
    ranks_per_host = max(local_world_size, 1)  # Topology itself refuses a size below 1.
    if local_rank is None:
        local_rank = rank % ranks_per_host
    if node_rank is None:
        node_rank = rank // ranks_per_host
    # Hosts may hold different numbers of ranks, so the count of hosts is a lower bound here;
    # the rendezvous learns the true one.
    num_nodes = max(node_rank + 1, -(-world_size // ranks_per_host))
    if env.LOCKSTEP_RENDEZVOUS.get(variables) is not None:
        launcher = "lockstep"
    elif env.TORCHELASTIC_RUN_ID.get(variables) is not None:
        launcher = "torchrun"
    else:
        launcher = "environment"
    return Topology(rank, world_size, local_rank, local_world_size, node_rank, num_nodes, launcher)


_READERS: tuple[Callable[[Mapping[str, str]], Topology | None], ...] = (_read_torchrun_form,)


def read_topology(
    variables: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
) -> Topology:
    """The topology that the environment describes; explicit arguments win.

    Args:
        variables: the environment, usually `env.snapshot()`.
        rank: overrides the environment; needs `world_size` too.
        world_size: overrides the environment; needs `rank` too.

    Returns:
        One process alone (rank 0 of 1) where no launcher is recognised.

    Raises:
        SetupError: variables that contradict each other, or only one of the two arguments.

    >>> read_topology({}).world_size
    1
    >>> read_topology({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).node_rank
    1
    """
    if (rank is None) != (world_size is None):
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise SetupError(f"{given} was given without {missing}: give both, or neither to read the environment")
    if rank is not None and world_size is not None:
        explicit = dict(variables)
        if env.RANK.get(variables) != rank or env.WORLD_SIZE.get(variables) != world_size:
            for variable in (env.LOCAL_RANK, env.LOCAL_WORLD_SIZE, env.GROUP_RANK, env.NODE_RANK):
                variable.unset(explicit)
        env.RANK.set(rank, explicit)
        env.WORLD_SIZE.set(world_size, explicit)
        topology = _read_torchrun_form(explicit)
        assert topology is not None
        return topology
    for reader in _READERS:
        topology = reader(variables)
        if topology is not None:
            return topology
    return Topology(rank=0, world_size=1, local_rank=0, local_world_size=1)
