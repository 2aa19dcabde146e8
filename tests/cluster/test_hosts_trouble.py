"""What goes wrong between hosts is said at once, on every rank, with the name of the rank that it is about."""

from __future__ import annotations

import pytest

import trouble_programs as programs
from netns_harness import Cluster, RankDied, needs_namespaces

pytestmark = needs_namespaces


@pytest.mark.parametrize("when", ["announced", "granted"])
def test_a_receive_whose_sender_dies_raises(hosts: Cluster, when: str) -> None:
    """It returned as if all were well, with the tensor as it was."""
    zero, one = hosts.run(programs.sender_dies, (1, 1), when)
    assert isinstance(one, RankDied)
    assert isinstance(zero, dict), zero
    kind, said, _, culprits = zero["raised"]
    assert (kind, culprits) == ("RankLost", (1,)), said
    assert zero["first"] == -1.0


def test_a_message_does_not_wait_for_one_of_another_rank(hosts: Cluster) -> None:
    """Both were waited for in turn, so a rank that had stopped made another one late."""
    assert hosts.run(programs.one_sender_stalls, (1, 1, 1)) == [[2.0, 1.0], [], []]


def test_a_worker_does_not_hide_the_end_of_its_rank(hosts: Cluster) -> None:
    """The copies of the connections that a forked process had kept them open."""
    for rank, found in enumerate(hosts.run(programs.parent_of_a_worker_dies, (1, 1, 1), 1)):
        if rank != 1:
            kind, said, _, culprits = found
            assert (kind, culprits) == ("RankLost", (1,)), said


def test_only_the_rank_that_is_missing_is_missed_and_only_in_its_group(hosts: Cluster) -> None:
    """The groups share Gloo's connections, and what one of them gives up may come later."""
    ranks = hosts.run(programs.one_is_late, (1, 1, 1), 2)
    for found in ranks:
        assert isinstance(found, dict), found
        assert found["sums"] == [(3.0 * number, 3.0 * number) for number in range(4)]
    kind, said, _, culprits = ranks[0]["raised"]
    assert (kind, culprits) == ("CollectiveTimeout", (2,)), said


def test_a_rank_that_dies_while_first_ranks_connect_is_lost_to_all(hosts: Cluster) -> None:
    """One rank of its host waits in the sum, for the one that connects; the group breaks for both."""
    ranks = hosts.run(programs.dies_while_first_ranks_connect, (1, 2, 1), [1, 2, 3])
    assert ranks[0] == []
    assert isinstance(ranks[3], RankDied)
    for found in ranks[1:3]:
        assert isinstance(found, list), found
        (kind, first, _, culprits), (again_kind, again, _, again_culprits) = found
        assert (kind, culprits) == (again_kind, again_culprits) == ("RankLost", (3,)), first
        assert "died" in first
        assert "while the group was being made" not in first
        assert "broke earlier on this rank" in again


@pytest.mark.parametrize("host", [0, 1])
def test_all_learn_that_a_host_has_no_memory(hosts: Cluster, host: int) -> None:
    """The other hosts waited until the deadline."""
    for rank, found in enumerate(hosts.run(programs.no_memory_for_slots, (2, 2), host, 2)):
        assert isinstance(found, dict), found
        kind, said, *_ = found["all_reduce"]
        assert kind == "SharedMemoryError", said
        assert ("no memory is left" if rank // 2 == host else f"cannot be had on host{'ab'[host]}") in said
        kind, said, _, culprits = found["broadcast"]
        if rank // 2 == host:
            assert (kind, said) == ("SetupError", "no memory is left")
        else:
            assert (kind, culprits[0] // 2) == ("RankLost", host), said
            assert "no memory is left" in said
        assert found["afterwards"] == 4.0


@pytest.mark.parametrize("where", ["gloo", "memory"])
@pytest.mark.parametrize("culprit", [0, 2])
def test_all_learn_why_a_group_is_not_made(hosts: Cluster, culprit: int, where: str) -> None:
    """They were told that the rank had come and gone again, or made the group and missed it in the first call."""
    for rank, found in enumerate(hosts.run(programs.fails_to_make_a_group, (1, 1, 1), culprit, where)):
        assert isinstance(found, dict), found
        kind, said, *_ = found["raised"]
        assert "the memory is on fire" in said
        if rank != culprit:
            assert kind == "SharedMemoryError"
            assert said.startswith(f"rank {culprit} could not join: ")
        assert found["sum"] == 3.0


def test_a_rank_that_dies_while_gloo_connects_is_named(hosts: Cluster) -> None:
    """Gloo keeps asking for it for five times as long as the group's timeout."""
    for rank, found in enumerate(hosts.run(programs.fails_to_make_a_group, (1, 1, 1), 1, "gloo dies")):
        if rank == 1:
            assert isinstance(found, RankDied)
            continue
        assert isinstance(found, dict), found
        kind, said, _, culprits = found["raised"]
        assert (kind, culprits) == ("RankLost", (1,)), said
