"""Reads the rank of a process of an MPI program from the variables that `mpirun` sets. Works without MPI.

[Note: hosts] MPI's launchers tell a process its number on its host, but not the number of the host.
(`OMPI_COMM_WORLD_NODE_RANK`, in spite of its name, is a number on the host as well.) So ranks are assumed to be placed
host by host, with the same number on each: then `node_rank` and `num_nodes` are correct, and also if all ranks are on
one host, which is what matters for shared memory. `lockstep.init(backend="mpi")` asks MPI itself, which knows.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep import env
from lockstep.errors import SetupError
from lockstep.topology.slurm import read_step
from lockstep.topology.topology import Topology

__all__ = ["check_size_is_known", "job_id", "read_mpi"]

_LAUNCHER = "mpirun"


def read_mpi(variables: Mapping[str, str]) -> Topology | None:
    """The topology set by mpirun of Open MPI, or of MPICH and Intel MPI, or by another launcher that supports PMI.

    Without the local variables all ranks are assumed to be on this host. See [Note: hosts].

    Raises:
        SetupError: the variables contradict each other.
    """
    return _read(
        variables,
        (env.OMPI_COMM_WORLD_RANK, env.OMPI_COMM_WORLD_SIZE),
        ((env.OMPI_COMM_WORLD_LOCAL_RANK, env.OMPI_COMM_WORLD_LOCAL_SIZE),),
    ) or _read_pmi(variables)


def _read_pmi(variables: Mapping[str, str]) -> Topology | None:
    topology = _read(
        variables,
        (env.PMI_RANK, env.PMI_SIZE),
        ((env.MPI_LOCALRANKID, env.MPI_LOCALNRANKS), (env.PMI_LOCAL_RANK, env.PMI_LOCAL_SIZE)),
    )
    step = read_step(variables) if topology is not None else None
    if (
        topology is not None
        and step is not None
        and (step.rank, step.num_tasks) == (topology.rank, topology.world_size)
    ):
        # `srun --mpi=pmi2` sets these as well, but Slurm's own variables also tell the hosts.
        return None
    return topology


def check_size_is_known(variables: Mapping[str, str]) -> None:
    """Raise for a rank without a world size: as a single process, it would train one of N separate models.

    Raises:
        SetupError: PMIX_RANK is set, but nothing that gives the number of ranks.
    """
    rank = env.PMIX_RANK.get(variables)
    if rank is not None:
        raise SetupError(
            f"PMIX_RANK is {rank}: a launcher has started this process as a rank, but no variable gives the number of "
            "ranks. Use lockstep.init(backend='mpi'), which asks MPI, or give rank and world_size"
        )


def job_id(variables: Mapping[str, str]) -> str | None:
    """An id that distinguishes this job from others on this host, if the launcher provides one; else None."""
    return env.PMIX_NAMESPACE.get(variables) or env.OMPI_MCA_ess_base_jobid.get(variables)


_Pair = tuple[env.Variable[int], env.Variable[int]]


def _read(variables: Mapping[str, str], world: _Pair, local: tuple[_Pair, ...]) -> Topology | None:
    """The topology from one launcher's variables: (rank, size), and alternatives for (local rank, local size)."""
    rank, world_size = world[0].get(variables), world[1].get(variables)
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        missing, there = (world[0], world[1]) if rank is None else (world[1], world[0])
        raise SetupError(f"{there.name} is set but {missing.name} is not: mpirun sets both; unset both for one process")
    local_rank, local_world_size = rank, world_size
    for rank_variable, size_variable in local:
        found = rank_variable.get(variables), size_variable.get(variables)
        if found[0] is not None and found[1] is not None:
            local_rank, local_world_size = found[0], found[1]
            break
    ranks_per_host = max(local_world_size, 1)  # Topology itself refuses a size below 1
    node_rank = rank // ranks_per_host
    num_nodes = max(node_rank + 1, -(-world_size // ranks_per_host))
    return Topology(rank, world_size, local_rank, local_world_size, node_rank, num_nodes, _LAUNCHER)
