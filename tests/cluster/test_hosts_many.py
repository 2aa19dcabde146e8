"""The lockstep group over four and more hosts: notices along a tree, sums between partners."""

from __future__ import annotations

from typing import Any

import pytest

import hosts_programs
import many_hosts_programs as programs
from lockstep.testing import limit_s
from lockstep.testing.conformance import run_conformance
from many_hosts_programs import LARGE, MEDIUM, SMALL, SUMMED
from netns_harness import Cluster, RankDied, needs_namespaces

pytestmark = needs_namespaces

AT_ONCE_S = 1.0


def test_backend_conforms(hosts: Cluster) -> None:
    sizes = (2, 1, 1, 2)

    def launch(fn: Any, _world_size: int, *args: Any, timeout: float = 60.0, **_: Any) -> list[Any]:
        return hosts.run(fn, sizes, *args, timeout=timeout)

    report = run_conformance("lockstep", sum(sizes), launch=launch)
    assert not report.failures, str(report)
    assert not [result for result in report.results if result.status == "skipped"]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2, 2, 2), (3, 1, 2, 1), (2, 1, 2)], ids=str)
def test_bits_are_those_of_the_tree_on_every_path(hosts: Cluster, sizes: tuple[int, ...]) -> None:
    for found in hosts.run(programs.bits_of_reductions, sizes):
        assert found == {"different": []}


def test_each_size_has_its_path(hosts: Cluster) -> None:
    assert hosts.run(programs.paths, (1, 1, 1, 1)) == [["doubling", "halving", "sum"]] * 4
    assert hosts.run(programs.paths, (2, 1, 1)) == [["sum"], [], ["sum"], ["sum"]], "three hosts have no partners"


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 1, 2), (2, 2, 2, 2)], ids=str)
def test_large_sums(hosts: Cluster, sizes: tuple[int, ...]) -> None:
    first, *others = hosts.run(programs.large_sums, sizes)
    assert first["wrong"] == []
    bits = first["bits"]
    assert bits[0] == bits[1], "the same bits again"
    assert all(one == first for one in others), "and on every rank"


def test_first_large_sum_without_descriptors_says_so_on_all_ranks(hosts: Cluster) -> None:
    for rank, (kind, said, seconds, _) in enumerate(hosts.run(programs.sum_without_descriptors, (2, 1, 1), 2)):
        assert kind == ("SetupError" if rank == 2 else "RankLost"), said
        assert "rank 2 of the group cannot join a new group, which takes up to" in said
        assert seconds < limit_s(AT_ONCE_S) + 0.5


def test_large_sums_of_two_groups_may_begin_in_any_order(hosts: Cluster) -> None:
    for found in hosts.run(programs.sums_of_two_groups, (1, 2, 1)):
        assert found == [4.0, 40.0]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 1, 2, 1)], ids=str)
def test_bits_do_not_depend_on_who_is_late(hosts: Cluster, sizes: tuple[int, ...]) -> None:
    first, *others = hosts.run(programs.same_bits_whoever_is_late, sizes)
    assert isinstance(first, list), first
    assert all(one == first for one in others)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 1, 2, 2)], ids=str)
def test_small_collectives(hosts: Cluster, sizes: tuple[int, ...]) -> None:
    assert hosts.run(programs.small_collectives, sizes) == [["well"]] * sum(sizes)


def test_sums_in_fewer_bits_are_within_the_bound(hosts: Cluster) -> None:
    first, *others = hosts.run(hosts_programs.sums, (1, 2, 1, 1), hosts_programs.LENGTHS, "bf16", "int8")
    for wire, found in first.items():
        assert found.pop("exact"), wire
        for numel, results in found.items():
            assert all(is_within for *_, is_within in results), f"{wire}, {numel}"
    for one in others:
        for found in one.values():
            assert found.pop("exact")
        assert one == first, "the same bits on every rank"


# A rank's first message of a collective is its notice, or the root's answer to those of all others.
@pytest.mark.parametrize(
    ("numel", "culprit", "after"),
    [
        (SMALL, 0, 0),
        (SMALL, 0, 2),
        (SMALL, 2, 0),
        (MEDIUM, 0, 4),
        (MEDIUM, 3, 1),
        (MEDIUM, 1, 2),
        (LARGE, 1, 1),
        (LARGE, 2, 2),
        (LARGE, 3, 3),
        (LARGE, 0, 6),
        (SUMMED, 0, 1),
        (SUMMED, 2, 1),
    ],
)
def test_who_dies_in_the_middle_is_named(hosts: Cluster, numel: int, culprit: int, after: int) -> None:
    outcomes = hosts.run(programs.acts_in_the_middle, (1, 1, 1, 1), numel, culprit, after, "killed")
    assert isinstance(outcomes.pop(culprit), RankDied)
    for kind, said, seconds, culprits in outcomes:
        assert (kind, culprits) == ("RankLost", (culprit,)), said
        assert "died: its process is gone" in said
        assert f"rank {culprit} (host{'abcd'[culprit]}, pid " in said
        assert seconds < limit_s(AT_ONCE_S) + 0.5


@pytest.mark.parametrize(
    ("numel", "culprit", "after"),
    [
        (SMALL, 0, 1),
        (SMALL, 3, 0),
        (MEDIUM, 1, 2),
        (LARGE, 1, 1),
        (LARGE, 3, 3),
        (SUMMED, 2, 1),
        (SUMMED, 0, 4),
    ],
)
def test_who_stops_in_the_middle_is_named_and_nobody_else(hosts: Cluster, numel: int, culprit: int, after: int) -> None:
    """Those who wait for a rank that waits for the one that stopped have the same deadline."""
    deadline_s = min(3.0, limit_s(1.0))  # longer than a busy machine keeps a process waiting
    outcomes = hosts.run(programs.acts_in_the_middle, (1, 1, 1, 1), numel, culprit, after, "stops", deadline_s)
    for rank, (kind, said, seconds, culprits) in enumerate(outcomes):
        assert (kind, culprits) == ("CollectiveTimeout", (culprit,)), said
        if rank != culprit:
            assert f"rank {culprit} (host{'abcd'[culprit]}, pid " in said
            assert seconds < deadline_s + limit_s(AT_ONCE_S)


def test_mismatches(hosts: Cluster) -> None:
    for found in hosts.run(hosts_programs.mismatches, (1, 1, 1, 1)):
        for name, text in (
            ("shape", "all_reduce(float32[4], SUM) at "),
            ("operation", "broadcast(float32[3], root=0) at "),
            ("large", "all_reduce(float32[500001], SUM) at "),
        ):
            kind, said, seconds, culprits = found[name]
            assert (kind, culprits) == ("CollectiveMismatch", (3,)), said
            assert "rank 3 (hostd, pid " in said
            assert text in said
            assert seconds < limit_s(AT_ONCE_S)
        assert found["after"][1] == str([4.0] * 2)
