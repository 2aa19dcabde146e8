"""Determines which launcher started this process: the first whose reader recognises its variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lockstep import env
from lockstep.errors import SetupError
from lockstep.topology.mpi import check_size_is_known, read_mpi
from lockstep.topology.slurm import read_slurm, topology_of_step
from lockstep.topology.topology import Topology
from lockstep.topology.torchrun import read_torchrun

__all__ = ["check_no_left_over", "read_topology"]

_Reader = Callable[[Mapping[str, str]], Topology | None]


def _read_variables(variables: Mapping[str, str]) -> Topology | None:
    """`RANK` and `WORLD_SIZE`; if set by hand under mpirun or in a Slurm step, completed by its local ranks."""
    topology = read_torchrun(variables)
    if topology is None or topology.launcher != "environment" or env.LOCAL_WORLD_SIZE.get(variables) is not None:
        return topology
    placed = read_mpi(variables)
    if placed is not None and (placed.rank, placed.world_size) == (topology.rank, topology.world_size):
        return placed
    return topology_of_step(variables, topology.rank, topology.world_size) or topology


# In order: the innermost launcher first, because launchers nest (`lockstep run` or mpirun inside of a Slurm step, whose
# tasks are then their daemons), and the inner one knows the ranks.
_READERS: tuple[_Reader, ...] = (_read_variables, read_mpi, read_slurm)


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
        The topology; a single process (rank 0 of 1) if no launcher is recognised.

    Raises:
        SetupError: variables contradict each other, or only one of the two arguments is given.

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
            for variable in (env.LOCAL_RANK, env.LOCAL_WORLD_SIZE, env.GROUP_RANK, env.GROUP_WORLD_SIZE, env.NODE_RANK):
                variable.unset(explicit)
        env.RANK.set(rank, explicit)
        env.WORLD_SIZE.set(world_size, explicit)
        topology = _read_variables(explicit)
        assert topology is not None
        return topology
    for reader in _READERS:
        topology = reader(variables)
        if topology is not None:
            _check_world_size(variables, topology)
            check_no_left_over(variables)
            return topology
    check_size_is_known(variables)
    if env.WORLD_SIZE.get(variables) is not None:
        raise SetupError("WORLD_SIZE is set but RANK is not: a launcher sets both; unset both for one process")
    return Topology(rank=0, world_size=1, local_rank=0, local_world_size=1)


def check_no_left_over(variables: Mapping[str, str]) -> None:
    """Raise if `RANK` and `WORLD_SIZE` are for fewer ranks than mpirun or srun have started.

    They may still be set in a shell in which somebody has tried a single rank. Each process started from there would
    take itself for that rank, and N processes would train N models. Launchers within a step know their ranks, and a
    script that starts ranks by itself has at least as many as there are processes.

    Raises:
        SetupError: they are for fewer.
    """
    topology = read_torchrun(variables)
    if topology is None or topology.launcher != "environment":
        return
    started = read_mpi(variables) or read_slurm(variables)
    if started is not None and started.world_size > topology.world_size:
        raise SetupError(
            f"RANK is {topology.rank} and WORLD_SIZE is {topology.world_size}, but {started.launcher} started "
            f"{started.world_size} ranks: unset RANK and WORLD_SIZE, or give rank and world_size"
        )


def _check_world_size(variables: Mapping[str, str], topology: Topology) -> None:
    declared = env.WORLD_SIZE.get(variables)
    if declared not in (None, topology.world_size):
        raise SetupError(
            f"WORLD_SIZE is {declared}, but {topology.launcher} started {topology.world_size} ranks: unset WORLD_SIZE, "
            "or give rank and world_size"
        )
