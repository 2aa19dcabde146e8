"""How notices reach all ranks, without ranks: who hands what on to whom, and what a rank does that waits."""

from __future__ import annotations

import math

import pytest

from lockstep.comm.messages import arrival
from lockstep.comm.messages.arrival import Arrival, Entries, rounds_of
from lockstep.comm.messages.notices import NoticeKind, forwarded_notices, notice_kind


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
    rank = Rank(world_size)
    assert rank.sent == [(peer, "alone") for peer in range(1, world_size)]
    rank.comes(*range(1, world_size))
    assert rank.arrival.go_on() == []
    assert len(rank.sent) == world_size - 1


class Rank:
    """Rank 0, with what it sends.

    Attributes:
        sent: (peer, ranks whose notices it got), in order; "alone" instead for this rank's own notice as such.
        arrival: at collective 7.
    """

    def __init__(self, world_size: int = 9) -> None:
        self.sent: list[tuple[int, object]] = []
        self.entries = Entries(world_size)
        self.comes(0)
        others = range(1, world_size)
        self.arrival = Arrival(0, 7, self.entries, others, rounds_of(0, world_size), self._send, 8 << 10)

    def comes(self, *ranks: int, number: int = 7) -> None:
        """The notices of ranks have come."""
        for rank in ranks:
            self.entries.add(rank, number, bytes([rank]) * 48, b"")

    def _send(self, peer: int, message: bytes) -> None:
        is_forwarded = notice_kind(memoryview(message)) is NoticeKind.FORWARDED
        ranks = tuple(rank for rank, _ in forwarded_notices(memoryview(message))) if is_forwarded else "alone"
        self.sent.append((peer, ranks))


def test_a_round_waits_for_the_one_before() -> None:
    rank = Rank()
    assert rank.sent == [(1, (0,))]
    rank.comes(7, 6)  # of the second round, before that of the first
    assert rank.arrival.go_on() == [1, 2, 3, 4, 5, 8]
    assert rank.sent == [(1, (0,))]
    rank.comes(8)
    rank.arrival.go_on()
    assert rank.sent[1:] == [(2, (0, 8)), (4, (0, 8, 7, 6))]
    rank.comes(*range(9))
    assert rank.arrival.go_on() == []
    assert rank.arrival.go_on() == []
    assert rank.sent[3:] == [(8, (0,))], "its last part in it, though it has everything itself, and once"


def test_who_is_one_ahead_has_not_come_for_that() -> None:
    rank = Rank()
    rank.comes(*range(1, 9), number=8)
    assert rank.arrival.go_on() == list(range(1, 9))
    assert rank.sent == [(1, (0,))]
    rank.comes(*range(1, 9))
    assert rank.arrival.go_on() == []


def test_who_waits_long_tells_all_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    rank.arrival.go_on()
    assert rank.sent == [(1, (0,))]
    now = arrival.time.monotonic() + 2 * arrival._PATIENCE_S
    monkeypatch.setattr(arrival.time, "monotonic", lambda: now)
    rank.arrival.go_on()
    rank.arrival.go_on()
    assert rank.sent[1:] == [(peer, "alone") for peer in range(1, 9)]
