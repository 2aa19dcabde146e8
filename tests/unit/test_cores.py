"""Whether a wait should yield its core: what yields have cost, on a clock that the test turns."""

from __future__ import annotations

import time

import pytest

from lockstep import libc
from lockstep.shm import cores
from lockstep.shm.cores import Cores


class Clock:
    """A yield takes as long as the test says."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.yield_s = 0.0

    def sched_yield(self) -> None:
        self.now_s += self.yield_s

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cores, "os", clock)
    monkeypatch.setattr(cores, "time", clock)
    return clock


def pause_after_loss(ours: Cores, clock: Clock) -> float:
    """Lose the core, and find out for how long no wait yields any more."""
    assert ours.may_yield(clock.now_s)
    clock.yield_s = 0.004
    assert ours.give_up(clock.now_s) == clock.now_s
    lost_at_s = clock.now_s
    while not ours.may_yield(clock.now_s):
        clock.now_s += 0.001
    return clock.now_s - lost_at_s


def test_core_that_comes_back_soon_is_not_lost(clock: Clock) -> None:
    ours = Cores()
    for clock.yield_s in (0.0, 0.00001, 0.0005):
        before_s = clock.now_s
        assert ours.may_yield(before_s)
        assert ours.give_up(before_s) == pytest.approx(before_s + clock.yield_s)
    assert ours.may_yield(clock.now_s)
    ours.give_up(clock.now_s, lost_after_s=0.0003)
    assert not ours.may_yield(clock.now_s)
    assert ours.are_lost


def test_lost_core_ends_yields_for_longer_each_time(clock: Clock) -> None:
    ours = Cores()
    pauses = [pause_after_loss(ours, clock) for _ in range(10)]
    assert pauses[0] < pauses[1] < pauses[2]
    assert pauses[-2:] == pytest.approx([cores._LONGEST_PAUSE_S] * 2, abs=0.002)
    assert clock.yield_s / pauses[-1] < 0.01, "what trying costs"


def test_long_without_a_loss_begins_anew(clock: Clock) -> None:
    ours = Cores()
    first = pause_after_loss(ours, clock)
    second = pause_after_loss(ours, clock)
    assert second > 1.5 * first
    clock.now_s += (cores._SOON + 1) * second
    assert pause_after_loss(ours, clock) == pytest.approx(first, abs=0.002)


def test_naps_are_short_and_leave_the_timer_as_it_was() -> None:
    slack_ns = libc.call("prctl", cores._PR_GET_TIMERSLACK, 0, 0, 0, 0)
    start = time.monotonic()
    for _ in range(20):
        cores.nap(30.0)
    assert time.monotonic() - start < 20.0
    assert libc.call("prctl", cores._PR_GET_TIMERSLACK, 0, 0, 0, 0) == slack_ns
