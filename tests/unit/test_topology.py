"""Who am I among whom, in every launcher's words."""

from __future__ import annotations

import json

import pytest

from lockstep.errors import SetupError
from lockstep.placement import describe_own_host, place
from lockstep.topology import Topology, read_topology

NOTHING_SAID = ("local_world_size", "local_rank", "node_rank", "num_nodes")

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "job",
}


def test_nothing_set_is_one_process() -> None:
    assert read_topology({}) == Topology(0, 1, 0, 1, 0, 1, "single")


def test_torchrun() -> None:
    assert read_topology(TORCHRUN) == Topology(5, 8, 1, 4, 1, 2, "torchrun")


def test_own_launcher_is_recognised_by_its_folder() -> None:
    variables = {**TORCHRUN, "LOCKSTEP_RENDEZVOUS": "/tmp/private"}
    assert read_topology(variables).launcher == "lockstep"


def test_processes_started_by_hand_are_on_one_host() -> None:
    assert read_topology({"RANK": "2", "WORLD_SIZE": "3"}) == Topology(
        2, 3, 2, 3, 0, 1, "environment", unsaid=NOTHING_SAID
    )


@pytest.mark.parametrize(
    ("said", "topology"),
    [
        # What AzureML and DeepSpeed say, and the first rank of a host, which cannot tell.
        (
            {"RANK": "5", "LOCAL_RANK": "1", "NODE_RANK": "1"},
            Topology(5, 8, 1, 4, 1, 2, "environment", unsaid=("local_world_size", "num_nodes")),
        ),
        (
            {"RANK": "4", "LOCAL_RANK": "0"},
            Topology(4, 8, 0, 4, 1, 2, "environment", unsaid=("local_world_size", "node_rank", "num_nodes")),
        ),
        (
            {"RANK": "0", "LOCAL_RANK": "0"},
            Topology(0, 8, 0, 8, 0, 1, "environment", unsaid=("local_world_size", "node_rank", "num_nodes")),
        ),
        (
            {"RANK": "7", "LOCAL_RANK": "2"},  # hosts with different numbers of ranks
            Topology(7, 8, 2, 5, 1, 2, "environment", unsaid=("local_world_size", "node_rank", "num_nodes")),
        ),
    ],
)
def test_local_rank_alone_is_kept_and_the_rest_is_a_guess(said: dict[str, str], topology: Topology) -> None:
    assert read_topology({"WORLD_SIZE": "8", **said}) == topology


def host(boot_id: str, processes: int, *gpus: str) -> str:
    return json.dumps([boot_id, str(processes), *gpus])


@pytest.mark.parametrize(
    ("hosts", "places"),
    [
        ([host("a", 1), host("a", 1)], [(0, 2, 0, 1), (1, 2, 0, 1)]),
        # A container for each rank, each with a GPU of its own, two of them on one machine.
        ([host("a", 1, "x"), host("a", 2, "y"), host("b", 1, "z")], [(0, 1, 0, 3), (0, 1, 1, 3), (0, 1, 2, 3)]),
        # Containers that see the same GPUs.
        ([host("a", 1, "x", "y"), host("a", 2, "x", "y")], [(0, 2, 0, 1), (1, 2, 0, 1)]),
        # In turn, and different numbers of them.
        ([host("a", 1), host("b", 1), host("a", 1)], [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 2)]),
    ],
)
def test_ranks_that_tell_where_they_are_are_placed(hosts: list[str], places: list[tuple[int, int, int, int]]) -> None:
    for rank, (local_rank, local_world_size, node_rank, num_nodes) in enumerate(places):
        guess = read_topology({"RANK": str(rank), "WORLD_SIZE": str(len(hosts))})
        found = place(guess, hosts)
        assert (found.local_rank, found.local_world_size) == (local_rank, local_world_size)
        assert (found.node_rank, found.num_nodes) == (node_rank, num_nodes)


def test_what_was_said_is_kept_when_ranks_are_placed() -> None:
    said = read_topology({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "3"})
    found = place(said, [host("a", 1), host("b", 1)])
    assert (found.local_rank, found.local_world_size, found.node_rank, found.num_nodes) == (1, 2, 3, 4)


def test_own_host_is_described_alike_by_its_processes() -> None:
    assert describe_own_host(["x"]) == describe_own_host(["x"])
    guess = read_topology({"RANK": "1", "WORLD_SIZE": "2"})
    assert place(guess, [describe_own_host(), describe_own_host()]).local_world_size == 2


def test_node_rank_is_taken_from_either_name_or_computed() -> None:
    base = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_topology(base).node_rank == 1
    assert read_topology({**base, "NODE_RANK": "1"}).num_nodes == 2
    assert read_topology({**base, "GROUP_RANK": "1", "NODE_RANK": "0"}).node_rank == 1


def test_hosts_with_different_numbers_of_ranks() -> None:
    """Three ranks on the first host and one on the second: the count of hosts includes both."""
    last = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
    topology = read_topology(last)
    assert (topology.node_rank, topology.local_world_size) == (1, 1)
    assert topology.num_nodes >= 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"rank is 2, but world_size is 2: expected 0 … 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, r"rank is -1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "world_size is 0; it must be at least 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "local_rank is 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, "more than world_size 2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
    ],
)
def test_contradictions_are_said(variables: dict[str, str], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        read_topology(variables)


def test_arguments_win_over_the_environment() -> None:
    topology = read_topology(TORCHRUN, rank=1, world_size=2)
    assert (topology.rank, topology.world_size) == (1, 2)
    assert (topology.local_rank, topology.local_world_size) == (1, 2), "the environment's local ranks do not apply"


@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"])
def test_no_local_variable_outlives_other_arguments(name: str) -> None:
    stale = {"RANK": "7", "WORLD_SIZE": "8", name: "3"}
    assert read_topology(stale, rank=0, world_size=2) == Topology(0, 2, 0, 2, 0, 1, "environment", unsaid=NOTHING_SAID)


def test_arguments_equal_to_the_environment_keep_its_local_ranks() -> None:
    assert read_topology(TORCHRUN, rank=5, world_size=8).local_world_size == 4


@pytest.mark.parametrize("arguments", [{"rank": 0}, {"world_size": 2}])
def test_one_argument_alone_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(SetupError, match="give both, or neither"):
        read_topology({}, **arguments)


def test_environment_is_left_as_it_was() -> None:
    variables = dict(TORCHRUN)
    read_topology(variables, rank=0, world_size=1)
    assert variables == TORCHRUN
