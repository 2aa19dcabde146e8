"""The sharded optimizer on several hosts: shares within each host, means between them."""

from __future__ import annotations

import pytest
import torch

import sharded_programs as programs
from netns_harness import Cluster, needs_namespaces

pytestmark = needs_namespaces


@pytest.mark.parametrize(
    ("sizes", "held"),
    [
        pytest.param((2, 2), [0.5] * 4, id="2+2"),
        pytest.param((2, 1), [0.5, 0.5, 1.0], id="2+1"),
        pytest.param((1, 1), [0.5, 0.5], id="1+1: over the hosts, as none has several ranks"),
    ],
)
def test_the_training_is_that_of_the_plain_optimizer(hosts: Cluster, sizes: tuple[int, ...], held: list[float]) -> None:
    outcomes = hosts.run(programs.train, sizes)
    assert [round(found["held"], 1) for found in outcomes] == held
    for found in outcomes:
        assert found["sharded"] == found["plain"] == outcomes[0]["plain"]


def test_a_host_has_parameters_and_state_once(hosts: Cluster) -> None:
    for found in hosts.run(programs.share, (2, 2)):
        assert (found["seen"], round(found["held"], 1)) == (3.0, 0.5)
        kind, said = found["raised"]
        assert kind == "ModelError", said
        assert "were changed outside of" in said


def test_the_image_recipe_shares_where_a_host_has_several_ranks(hosts: Cluster) -> None:
    assert hosts.run(programs.recipe, (2, 1)) == [[True, False]] * 3
    assert hosts.run(programs.recipe, (1, 1)) == [[False, False]] * 2


def test_the_state_comes_to_one_rank(hosts: Cluster) -> None:
    for rank, found in enumerate(hosts.run(programs.consolidate, (2, 2), 3)):
        assert found == ([0, 1, 2, 3] if rank == 3 else ["CheckpointError"])


def test_a_state_goes_to_other_hosts(hosts: Cluster) -> None:
    """To another number of ranks, which all have the batch that the ranks before had."""
    states = hosts.run(programs.resume, (2, 2), None)
    resumed, moved = hosts.run(programs.resume, (2, 2), states[3]), hosts.run(programs.resume, (2, 1), states[3])
    for found in (*resumed, *moved):
        assert found["model"].keys() == states[0]["model"].keys()
        for name, value in found["model"].items():
            torch.testing.assert_close(value, resumed[0]["model"][name], rtol=1e-5, atol=1e-6)
            assert not torch.equal(value, states[0]["model"][name])
