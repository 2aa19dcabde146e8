"""How notices reach all ranks, without ranks: who hands what on to whom, and what a rank does that waits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from lockstep.comm.messages import arrival
from lockstep.comm.messages.arrival import Arrival, rounds_of


@pytest.mark.parametrize("world_size", [9, 10, 15, 16, 17, 31, 33, 64])
def test_after_the_rounds_everybody_has_every_notice(world_size: int) -> None:
    rounds = [rounds_of(rank, world_size) for rank in range(world_size)]
    assert {len(one) for one in rounds} == {math.ceil(math.log2(world_size))}
    has = [{rank} for rank in range(world_size)]
    for number in range(len(rounds[0])):
        sent = [(one[number].peer, set(one[number].given)) for one in rounds]
        assert all(given <= has[rank] for rank, (_, given) in enumerate(sent)), "nobody hands on what has not come"
        before = [set(one) for one in has]
        for peer, given in sent:
            assert not given & before[peer], "nothing comes twice"
            has[peer] |= given
        assert all(has[rank] - before[rank] == set(one[number].awaited) for rank, one in enumerate(rounds))
    assert all(one == set(range(world_size)) for one in has)


@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
def test_few_ranks_tell_each_other(world_size: int) -> None:
    assert rounds_of(0, world_size) == ()
    told: list[str] = []
    Arrival((), lambda rank: False, lambda peer, ranks: None, lambda: told.append("all"))
    assert told == ["all"]


class Rank:
    """Rank 0 of 9, with what it sends.

    Attributes:
        here: the ranks whose notices have come.
        sent: (peer, ranks whose notices it got), in order; "all" where all got this rank's.
    """

    def __init__(self) -> None:
        self.here: set[int] = {0}
        self.sent: list[object] = []
        self.arrival = Arrival(rounds_of(0, 9), self.here.__contains__, self._hand_on, lambda: self.sent.append("all"))

    def _hand_on(self, peer: int, ranks: Sequence[int]) -> None:
        self.sent.append((peer, tuple(ranks)))


def test_a_round_waits_for_the_one_before() -> None:
    rank = Rank()
    assert rank.sent == [(1, (0,))]
    rank.here |= {7, 6}  # of the second round, before that of the first
    rank.arrival.go_on()
    assert rank.sent == [(1, (0,))]
    rank.here.add(8)
    rank.arrival.go_on()
    assert rank.sent[1:] == [(2, (0, 8)), (4, (0, 8, 7, 6))]
    rank.here |= set(range(9))
    rank.arrival.go_on()
    rank.arrival.go_on()
    assert rank.sent[3:] == [(8, (0,))], "its last part in it, though it has everything itself, and once"


def test_who_waits_long_tells_all_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    rank.arrival.go_on()
    assert "all" not in rank.sent
    now = arrival.time.monotonic() + 2 * arrival._PATIENCE_S
    monkeypatch.setattr(arrival.time, "monotonic", lambda: now)
    rank.arrival.go_on()
    rank.arrival.go_on()
    assert rank.sent == [(1, (0,)), "all"]
