"""Several groups over the same hosts: they share the connections between their ranks, and nothing else."""

from __future__ import annotations

import pytest
import torch

import groups_programs as programs
from lockstep.comm.torch_version import joins_gloo_with_gil
from lockstep.testing import limit_s
from lockstep.torch_private.gloo_waits import can_end_waits
from netns_harness import Cluster, RankDied, needs_namespaces

pytestmark = needs_namespaces

AT_ONCE_S = 1.0


def test_further_groups_take_no_connections(hosts: Cluster) -> None:
    """Each group connected all pairs of its ranks twice, once for messages and once for Gloo; later once, for Gloo."""
    for found in hosts.run(programs.connections, (2, 1, 1), 4):
        assert isinstance(found, dict), found
        assert found["during"] == (0 if can_end_waits() else 4 * 3)
        if not joins_gloo_with_gil(torch.__version__):  # else Gloo's stay until the end
            assert found["after"] == found["before"]


def test_a_rank_that_cannot_share_gloo_has_all_connect(hosts: Cluster) -> None:
    assert hosts.run(programs.cannot_share, (2, 1), 1) == [(100_000 * 3.0, 2)] * 3


def test_groups_work_at_the_same_time(hosts: Cluster) -> None:
    assert hosts.run(programs.at_the_same_time, (2, 1), 3, 24) == [[0.0] * 3] * 3


def test_groups_are_made_again_under_the_same_names(hosts: Cluster) -> None:
    assert hosts.run(programs.made_again, (1, 1, 1)) == [[3.0] * 9 + [3.0]] * 3


@pytest.mark.parametrize("culprit", [0, 3])
def test_all_groups_of_a_rank_that_dies_say_so(hosts: Cluster, culprit: int) -> None:
    for rank, found in enumerate(hosts.run(programs.lose_one, (2, 2), culprit)):
        if rank == culprit:
            assert isinstance(found, RankDied)
            continue
        assert isinstance(found, dict), found
        for name in ("default", "group"):
            kind, said, seconds, culprits = found[name]
            assert (kind, culprits) == ("RankLost", (culprit,)), said
            assert "died: its process is gone" in said
            assert seconds < limit_s(AT_ONCE_S)
        assert found["others"][1] == "nothing was raised"


def test_who_leaves_one_group_stays_in_the_others(hosts: Cluster) -> None:
    for rank, found in enumerate(hosts.run(programs.leave_one_group, (2, 1), 1)):
        assert isinstance(found, dict), found
        assert found["sums"] == (3.0, 3.0)
        if rank != 1:
            kind, said, _, culprits = found["raised"]
            assert (kind, culprits) == ("RankLost", (1,)), said
            assert "left the group while others still needed it" in said
