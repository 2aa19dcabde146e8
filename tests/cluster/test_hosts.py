"""The lockstep group over several hosts, which are namespaces of this machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hosts_programs as programs
from lockstep.errors import RendezvousError
from lockstep.testing import limit_s
from lockstep.testing.conformance import run_conformance
from netns_harness import MASTER_PORT, Cluster, RankDied, needs_namespaces

pytestmark = needs_namespaces

# From the moment the trouble is there until every waiting rank must have raised, on a busy machine.
AT_ONCE_S = 1.0


def well(outcomes: list[Any]) -> list[dict[str, Any]]:
    """Outcomes that are no exceptions."""
    for one in outcomes:
        if isinstance(one, BaseException):
            raise one
    return outcomes


# From four ranks on they hand on each other's notices, here by way of two others. Four hosts: test_hosts_many.py.
@pytest.mark.parametrize("sizes", [(3, 1), (2, 2, 2)], ids=str)
def test_backend_conforms(hosts: Cluster, sizes: tuple[int, ...]) -> None:
    def launch(fn: Any, _world_size: int, *args: Any, timeout: float = 60.0, **_: Any) -> list[Any]:
        return hosts.run(fn, sizes, *args, timeout=timeout)

    report = run_conformance("lockstep", sum(sizes), launch=launch)
    print(report)
    assert not report.failures, str(report)
    assert not [result for result in report.results if result.status == "skipped"]


@pytest.mark.parametrize(("sizes", "seeds"), [((2, 2), range(2)), ((2, 1, 1), range(2, 4))], ids=str)
def test_random_programs(hosts: Cluster, sizes: tuple[int, ...], seeds: range) -> None:
    assert hosts.run(programs.soak, sizes, seeds) == ["no mismatch"] * sum(sizes)


def test_init(hosts: Cluster) -> None:
    ranks = well(hosts.run(programs.what_init_says, (2, 2)))
    for rank, found in enumerate(ranks):
        assert found["backend"] == "lockstep"
        assert found["sum"] == 40.0
        assert found["interfaces"] == ("eth0", "eth0")
        own = hosts.hosts[rank // 2].address
        assert found["ports"], "Gloo listens"
        assert {address for address, _ in found["ports"]} == {own}
        line = "[lockstep] 2 hosts: hosta (ranks 0, 1) eth0 10.77.0.1 | hostb (ranks 2, 3) eth0 10.77.0.2\n"
        assert found["said"] == (line if rank == 0 else "")
    assert any(port >= MASTER_PORT for _, port in ranks[0]["ports"])


def test_nobody_connects_to_gloo_once_the_group_is_there(hosts: Cluster) -> None:
    """Gloo kept every connection, and a process without descriptors for one more was killed (SIGABRT)."""
    for found in well(hosts.run(programs.knocks_at_gloo, (1, 1))):
        assert found["doors"] == ["TimeoutError", "TimeoutError"]
        assert found["sum"] == [4.0]


def test_new_group_without_descriptors_says_so_on_all_ranks(hosts: Cluster) -> None:
    """A rank without descriptors let the others wait, or was killed by Gloo (SIGABRT)."""
    for said, total in hosts.run(programs.little_left, (1, 2), 1):
        assert "rank 1 cannot join a new group, which takes up to" in said
        assert "raise the limit (ulimit -n)" in said
        assert total == 3.0


def test_ranks_without_a_token_say_so_once(hosts: Cluster) -> None:
    ranks = well(hosts.run(programs.what_init_says, (1, 1), more=lambda rank: {"LOCKSTEP_TOKEN": ""}))
    assert ranks[0]["said"].count("these ranks have no token (LOCKSTEP_TOKEN)") == 1
    assert ranks[1]["said"] == ""


def test_ranks_with_different_tokens_are_told(hosts: Cluster) -> None:
    more = [{"LOCKSTEP_TOKEN": "a" * 64}, {"LOCKSTEP_TOKEN": "b" * 64}]
    zero, one = hosts.run(programs.what_init_says, (1, 1), limit_s(2.0), more=lambda rank: more[rank])
    assert isinstance(zero, RendezvousError)
    assert isinstance(one, RendezvousError)
    assert "rank 1 did not come" in str(zero)
    assert "Do all ranks have the same LOCKSTEP_TOKEN" in str(one)


def test_interface_that_is_not_there(hosts: Cluster) -> None:
    ranks = hosts.run(programs.wrong_interface, (1, 1), more=lambda rank: {"GLOO_SOCKET_IFNAME": "ib7"} if rank else {})
    assert "RendezvousError: GLOO_SOCKET_IFNAME=ib7, but on hostb no such interface is up" in ranks[1]
    assert "there are: lo (127.0.0.1), eth0 (10.77.0.2)" in ranks[1]
    assert "rank 1 could not join: GLOO_SOCKET_IFNAME=ib7" in ranks[0], "and the others need not wait"


def test_groups(hosts: Cluster) -> None:
    ranks = well(hosts.run(programs.groups, (2, 2)))
    for rank, found in enumerate(ranks):
        assert found.pop("objects") == [0, 1, 2, 3]
        assert found.pop("async") == [4.0] * 29
        expected = {
            "[0, 1]": (1.0, "SharedMemoryTeam"),
            "[2, 3]": (5.0, "SharedMemoryTeam"),
            "[1, 2]": (3.0, "HostsTeam"),
        }
        expected |= {"[0, 2, 3]": (5.0, "HostsTeam"), "[3, 0]": (3.0, "HostsTeam")}
        for name, (total, team) in expected.items():
            assert found.get(name) == (([total], team) if str(rank) in name else None), name


def test_horovods_optimizer(hosts: Cluster) -> None:
    """It took its gradients through memory that all ranks share, also where they do not: an error in every step."""
    ranks = well(hosts.run(programs.horovod_step, (2, 1)))
    assert ranks == [([2.0, 2.0], [-2.0, -2.0])] * 3


def test_messages(hosts: Cluster) -> None:
    ranks = well(hosts.run(programs.messages, (3, 1)))
    for found in ranks:
        for numel in ("3", "1000", "700000"):
            assert found[numel] == [[0.0], [1.0], [2.0], [3.0]]
    assert ranks[0]["any"] == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1, 1)], ids=str)
def test_sums_are_within_the_bound_and_the_same_everywhere(hosts: Cluster, sizes: tuple[int, ...]) -> None:
    ranks = well(hosts.run(programs.sums, sizes, programs.LENGTHS, "fp32", "bf16", "fp16", "int8"))
    for wire, found in ranks[0].items():
        assert found.pop("exact"), wire
        for numel, results in found.items():
            assert [divisor for divisor, *_ in results] == [1, len(ranks)], f"{wire}, {numel}: not the same bits again"
            assert all(is_within for *_, is_within in results), f"{wire}, {numel}"
    for one in ranks[1:]:
        for found in one.values():
            assert found.pop("exact")
        assert one == ranks[0], "the same bits on every rank"


@pytest.mark.parametrize("late", [0, 1])
def test_no_rank_reads_what_a_peer_of_its_host_has_yet_to_multiply(hosts: Cluster, late: int) -> None:
    assert hosts.run(programs.premultiplied_late, (2, 1), late) == [1.5] * 3


def test_environment_chooses_the_wire(hosts: Cluster) -> None:
    length = (70_001,)
    by_argument = well(hosts.run(programs.sums, (1, 1), length, "bf16"))
    by_variable = well(hosts.run(programs.sums, (1, 1), length, None, more=lambda _: {"LOCKSTEP_WIRE": "bf16"}))
    by_each = by_argument[0]["bf16"], by_variable[0]["None"]
    bits, same_bits = ([one[:3] for one in found["70001"]] for found in by_each)
    assert bits == same_bits
    ranks = hosts.run(programs.sums, (1, 1), length, None, more=lambda rank: {"LOCKSTEP_WIRE": "bf16"} if rank else {})
    for found in ranks:
        assert type(found).__name__ == "SetupError"
        assert "was given the wire format" in str(found)


def test_training_is_that_of_one_process(hosts: Cluster) -> None:
    (alone,) = well(hosts.run(programs.train, (1,), 2))
    for sizes in ((2, 2), (3, 1)):
        for found in well(hosts.run(programs.train, sizes, 2)):
            difference = (torch.tensor(found["weights"]) - torch.tensor(alone["weights"])).abs().max()
            assert float(difference) <= 1e-12, sizes


@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_rounding_between_hosts_is_no_difference_of_batches(hosts: Cluster, wire: str) -> None:
    """Both formats make a whole block nan if one value of it is infinite."""
    for first, infinite, last, other_rows in well(hosts.run(programs.overflow, (2, 1), wire)):
        assert first.startswith("tensor([2")
        assert "nan" in infinite or "inf" in infinite
        assert last.startswith("tensor([-14")
        assert other_rows == "CollectiveMismatch"


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3, 3)], ids=str)
def test_mismatches(hosts: Cluster, sizes: tuple[int, ...]) -> None:
    for rank, found in enumerate(well(hosts.run(programs.mismatches, sizes))):
        for name, text in (
            ("shape", "all_reduce(float32[4], SUM) at "),
            ("operation", "broadcast(float32[3], root=0) at "),
            ("large", "all_reduce(float32[500001], SUM) at "),
        ):
            kind, said, seconds, culprits = found[name]
            assert (kind, culprits) == ("CollectiveMismatch", (sum(sizes) - 1,)), said
            assert f"rank {sum(sizes) - 1} (host{'abc'[len(sizes) - 1]}, pid " in said
            assert text in said
            assert "hosts_programs.py:" in said
            assert seconds < limit_s(AT_ONCE_S)
        assert found["after"][1] == str([float(sum(sizes))] * 2)
        if rank == 0:  # the sender of a small message does not wait for it
            assert found["message"][0] == "CollectiveMismatch"


@pytest.mark.parametrize(
    ("per_host", "culprit", "how", "kind", "text"),
    [
        (2, 3, "killed", "RankLost", "died: its process is gone"),
        (2, 1, "killed", "RankLost", "died: its process is gone"),
        (2, 2, "killed in the middle", "RankLost", "died: its process is gone"),
        (2, 0, "raised", "RankLost", "ValueError: out of cheese"),
        (2, 2, "left", "RankLost", "left the group while others still needed it"),
        (5, 7, "killed", "RankLost", "died: its process is gone"),
        (5, 3, "raised", "RankLost", "ValueError: out of cheese"),
        (5, 9, "left", "RankLost", "left the group while others still needed it"),
    ],
)
def test_every_rank_names_the_one_that_is_lost(
    hosts: Cluster, per_host: int, culprit: int, how: str, kind: str, text: str
) -> None:
    ranks = hosts.run(programs.lose_one, (per_host, per_host), culprit, how)
    for rank, found in enumerate(ranks):
        if rank == culprit:
            assert isinstance(found, RankDied) == how.startswith("killed")
            continue
        assert isinstance(found, dict), found
        got, said, seconds, culprits = found["first"]
        assert (got, culprits) == (kind, (culprit,)), said
        assert text in said
        assert f"rank {culprit} (host{'ab'[culprit // per_host]}, pid " in said
        assert "hosts_programs.py:" in said
        assert seconds < limit_s(AT_ONCE_S) + (0.5 if "middle" in how else 0.0)
        assert found["again"][0] == kind
        assert "broke earlier" in found["again"][1]


@pytest.mark.parametrize("per_host", [2, 5])
def test_rank_that_never_comes(hosts: Cluster, per_host: int) -> None:
    """Nobody is missed who has come, though its notice would have been handed on by the one that has not."""
    deadline_s = min(3.0, limit_s(1.0))  # longer than a busy machine keeps a process waiting
    ranks = well(hosts.run(programs.never_comes, (per_host, per_host), deadline_s))
    last = 2 * per_host - 1
    for rank, found in enumerate(ranks):
        kind, said, seconds, culprits = found["all_reduce"]
        assert (kind, culprits) == ("CollectiveTimeout", (last,)), said
        if rank != last:
            assert f"rank {last} (hostb, pid " in said
            assert seconds < deadline_s + limit_s(AT_ONCE_S)


@pytest.mark.parametrize("slow", [0, 5])
def test_who_went_after_its_part_is_not_missed(hosts: Cluster, slow: int) -> None:
    """Its notice may come by way of others later than the news that it has gone."""
    assert hosts.run(programs.leaves_after_its_part, (5, 5), slow) == ["nothing was raised"] * 10


@pytest.mark.parametrize("culprit", [0, 5])
def test_rank_that_dies_before_it_hands_on_is_named(hosts: Cluster, culprit: int) -> None:
    outcomes = hosts.run(programs.dies_handing_on, (5, 5), culprit)
    assert isinstance(outcomes.pop(culprit), RankDied)
    assert any(kind for kind, *_ in outcomes)
    for kind, said, seconds, culprits in outcomes:
        assert (kind, culprits) in (("", ()), ("RankLost", (culprit,))), said
        assert seconds < 0.3 + limit_s(AT_ONCE_S)


@pytest.mark.parametrize("late", [0, 5])
def test_notices_of_two_collectives_at_once(hosts: Cluster, late: int) -> None:
    """A rank that was told of the next collective before this one took old parts for those of this one."""
    expected = [float(sum(number * 10 + rank for rank in range(10))) for number in range(40)]
    assert hosts.run(programs.one_ahead, (5, 5), late) == [expected] * 10


def test_partner_that_is_killed(hosts: Cluster) -> None:
    ranks = hosts.run(programs.lose_partner, (2, 2), 3)
    for found in ranks[:3]:
        assert isinstance(found, dict), found
        kind, said, seconds, culprits = found["recv"]
        assert (kind, culprits) == ("RankLost", (3,)), said
        assert "rank 3 (hostb, pid " in said
        assert seconds < limit_s(AT_ONCE_S)


@pytest.mark.parametrize("leaver", [1, 2])
def test_leaver_ends_its_own_messages_alone(hosts: Cluster, leaver: int) -> None:
    """Of this host, and of another."""
    server, *clients = well(hosts.run(programs.serve_after_a_leaver, (2, 1), leaver))
    kind, said, _, culprits = server.pop("gone")
    assert (kind, culprits) == ("RankLost", (leaver,)), said
    assert {said for found in (server, *clients) for _, said, _, _ in found.values()} == {"nothing was raised"}


def test_leaving_lets_asynchronous_calls_end(hosts: Cluster) -> None:
    assert hosts.run(programs.destroys_ahead, (2, 1), 0) == [[6.0] * 3] * 3
