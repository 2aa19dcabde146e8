"""Who a process of an MPI program is, in the words of every launcher."""

from __future__ import annotations

import pytest

from lockstep.errors import SetupError
from lockstep.topology import Topology, read_topology
from lockstep.topology.mpi import job_id

# What mpirun of Open MPI 4.1 sets for the last of four ranks on two hosts.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_ess_base_jobid": "2084372481",
    "PMIX_NAMESPACE": "2084372481",
    "PMIX_RANK": "3",
}
# What mpirun of MPICH sets for the second of three ranks on one host.
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"}
SLURM_STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}


def test_open_mpi() -> None:
    assert read_topology(OPEN_MPI) == Topology(3, 4, 1, 2, 1, 2, "mpirun")


def test_mpich_and_intel() -> None:
    assert read_topology(MPICH) == Topology(1, 3, 1, 3, 0, 1, "mpirun")


def test_cray() -> None:
    variables = {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "2"}
    assert read_topology(variables) == Topology(2, 4, 0, 2, 1, 2, "mpirun")


def test_without_local_variables_all_ranks_are_here() -> None:
    assert read_topology({"PMI_RANK": "2", "PMI_SIZE": "4"}) == Topology(2, 4, 2, 4, 0, 1, "mpirun")


def test_ranks_placed_in_turn_keep_their_local_rank() -> None:
    """Rank 2 of four, placed host by host in turn, is the second of its host."""
    in_turn = OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert read_topology(in_turn).local_rank == 1


def test_torchrun_inside_of_mpirun_wins() -> None:
    inner = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    assert read_topology(OPEN_MPI | inner) == Topology(0, 2, 0, 2, 0, 1, "torchrun")


def test_script_that_starts_more_ranks_than_mpirun_is_left_alone() -> None:
    assert read_topology(OPEN_MPI | {"RANK": "5", "WORLD_SIZE": "8"}).world_size == 8


def test_mpirun_inside_of_a_slurm_step_wins() -> None:
    """mpirun starts one daemon per node by srun; the ranks inherit the daemon's variables."""
    assert read_topology(SLURM_STEP | OPEN_MPI).launcher == "mpirun"


def test_srun_that_speaks_pmi_is_slurm() -> None:
    topology = read_topology(SLURM_STEP | {"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert (topology.launcher, topology.num_nodes) == ("slurm", 2)


def test_arguments_equal_to_what_mpirun_says_keep_its_local_ranks() -> None:
    assert read_topology(OPEN_MPI, rank=3, world_size=4) == Topology(3, 4, 1, 2, 1, 2, "mpirun")
    other = read_topology(OPEN_MPI, rank=0, world_size=2)
    assert (other.launcher, other.local_world_size) == ("environment", 2)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK is set but OMPI_COMM_WORLD_SIZE is not"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is set but PMI_RANK is not"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, "rank is 2, but world_size is 2"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK is 1: .* no variable gives the number of ranks.*backend='mpi'"),
        (MPICH | {"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but mpirun started 3 ranks"),
        (MPICH | {"RANK": "0", "WORLD_SIZE": "1"}, "RANK is 0 and WORLD_SIZE is 1, but mpirun started 3 ranks: unset"),
    ],
)
def test_contradictions_are_said(variables: dict[str, str], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        read_topology(variables)


def test_slurm_gives_the_size_that_pmix_lacks() -> None:
    assert read_topology(SLURM_STEP | {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0"}).launcher == "slurm"


def test_job_id() -> None:
    assert job_id(OPEN_MPI) == "2084372481"
    assert job_id({"OMPI_MCA_ess_base_jobid": "5"}) == "5"
    assert job_id(MPICH) is None
