"""Who is blamed where ranks wait for each other."""

from __future__ import annotations

from lockstep.comm.hosts.late_ranks import FIRST_RANKS, LateRanks

NUMBER = 7  # of the collective that all are in


class Group:
    """What the ranks of three hosts with two ranks each say, as rank 0 hears it."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.own = self.seen_by(0)

    def seen_by(self, rank: int) -> LateRanks:
        return LateRanks(rank, (0, 2, 4), lambda _: NUMBER, self.sent.append)

    def hear(self, rank: int, awaited: int, number: int = NUMBER) -> None:
        """Rank 0 hears that another one waits."""
        other = self.seen_by(rank)
        other.say_to_await(awaited, number)
        assert self.own.receive(rank, memoryview(self.sent.pop()))


def test_the_last_of_those_who_wait_is_blamed() -> None:
    group = Group()
    assert group.own.awaited_by([2, 4]) == [2, 4]
    group.hear(2, 3)
    assert group.own.awaited_by([2, 4]) == [4, 3]
    group.hear(4, 2)
    assert group.own.awaited_by([4]) == [3]


def test_in_a_sum_those_are_blamed_that_do_not_say_that_they_wait() -> None:
    group = Group()
    group.hear(2, FIRST_RANKS)
    assert group.own.awaited_by([2, 4]) == [4]
    assert group.own.awaited_by([2]) == [4], "also by who waits for one of them alone"
    group.hear(4, 5)
    assert group.own.awaited_by([2, 4]) == [5], "which has not come to the sum, because of another rank of its host"
    group.hear(4, FIRST_RANKS)
    assert group.own.awaited_by([2, 4]) == [], "nobody knows"


def test_what_was_said_of_an_earlier_collective_is_over() -> None:
    group = Group()
    group.hear(2, 3, NUMBER - 1)
    assert group.own.awaited_by([2]) == [2]


def test_who_waits_for_this_rank_is_blamed_itself() -> None:
    group = Group()
    group.hear(2, 0)
    assert group.own.awaited_by([2]) == [2]


def test_a_wait_is_told_once_and_taken_back_once() -> None:
    group = Group()
    group.own.say_to_go_on(NUMBER)
    assert not group.sent
    for _ in range(3):
        group.own.say_to_await(2, NUMBER)
    assert len(group.sent) == 1
    for _ in range(3):
        group.own.say_to_go_on(NUMBER)
    assert len(group.sent) == 2
    assert not group.own.receive(2, memoryview(b"something else of another kind"))
