"""The position of one process in a job, and the names of ranks in messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.errors import SetupError

__all__ = ["Topology", "name_each", "name_ranks"]


@dataclass(frozen=True)
class Topology:
    """The position of one process in a job.

    Attributes:
        rank: global rank, 0 … world_size-1.
        world_size: number of ranks over all hosts.
        local_rank: rank among the processes of this host.
        local_world_size: number of ranks on this host.
        node_rank: number of this host.
        num_nodes: number of hosts.
        launcher: what started this process: "lockstep", "torchrun", "mpirun", "slurm", "environment" or "single".
        hosts: names of the hosts in the order of their numbers, as given by the launcher; empty if it gives none.
        unsaid: which of `local_rank`, `local_world_size`, `node_rank` and `num_nodes` were not provided. They are
            guesses until the ranks have exchanged their hosts.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = 0
    num_nodes: int = 1
    launcher: str = "single"
    hosts: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()

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
        if self.hosts and len(self.hosts) != self.num_nodes:
            raise SetupError(
                f"num_nodes is {self.num_nodes}, but there are {len(self.hosts)} hosts: {list(self.hosts)}"
            )


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 1, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def name_each(ranks: Iterable[int | str]) -> str:
    """`rank 3`, or `rank 0, rank 1, rank 3`."""
    return ", ".join(f"rank {rank}" for rank in ranks)
