"""Doorbells: who is woken by what. No ranks: threads."""

from __future__ import annotations

import threading
import time

import pytest

from lockstep.shm.doorbell import Doorbell
from lockstep.shm.futex import Futex
from lockstep.shm.mail_area import MailArea
from lockstep.shm.segment import Segment

_LONG_S = 20.0

pytestmark = pytest.mark.skipif(not Futex.is_supported(), reason="no futex on this machine")


@pytest.fixture
def bells() -> list[Doorbell]:
    """Of three ranks."""
    start = 4096
    area = MailArea(Segment.create(start + MailArea.size_bytes(3)), start, 3)
    return [Doorbell(area, place) for place in range(3)]


def seconds_asleep(bell: Doorbell, seen: int, limit_s: float) -> float:
    start = time.monotonic()
    bell.sleep(seen, limit_s, 0.0)
    return time.monotonic() - start


def test_ring_ends_a_sleep(bells: list[Doorbell]) -> None:
    mine, other, _ = bells
    seen = mine.arm(wants_room=False)
    threading.Timer(0.02, other.ring, [0], {"wrote": True}).start()
    assert seconds_asleep(mine, seen, _LONG_S) < _LONG_S / 2


def test_ring_before_the_sleep_prevents_it(bells: list[Doorbell]) -> None:
    mine, other, third = bells
    for ringer in (other, third, other):
        seen = mine.arm(wants_room=False)
        ringer.ring(0, wrote=True)
        assert seconds_asleep(mine, seen, _LONG_S) < _LONG_S / 2


def test_two_who_ring_do_not_cancel_each_other(bells: list[Doorbell]) -> None:
    """Both have seen the bell armed before either rang: what the second writes is new, too."""
    mine, other, third = bells
    seen = mine.arm(wants_room=False)
    other._wake(0)
    between = mine.arm(wants_room=False)
    third._wake(0)
    assert len({seen, between, mine.arm(wants_room=False)}) == 3


@pytest.mark.parametrize(
    ("wants_room", "wrote", "is_rung"),
    [(False, True, True), (False, False, False), (True, True, True), (True, False, True)],
)
def test_room_rings_for_those_who_want_it(
    bells: list[Doorbell], wants_room: bool, wrote: bool, is_rung: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes: list[int] = []
    monkeypatch.setattr(Futex, "wake", lambda futex, index: wakes.append(index))
    mine, other, _ = bells
    seen = mine.arm(wants_room)
    other.ring(0, wrote=wrote)
    assert (mine.arm(wants_room) != seen) is is_rung
    assert len(wakes) == is_rung


def test_nobody_is_called_for_who_does_not_sleep(bells: list[Doorbell], monkeypatch: pytest.MonkeyPatch) -> None:
    wakes: list[int] = []
    monkeypatch.setattr(Futex, "wake", lambda futex, index: wakes.append(index))
    mine, other, third = bells
    other.ring(0, wrote=True)
    mine.ring_here()
    assert wakes == []
    mine.arm(wants_room=False)
    other.ring(0, wrote=True)
    third.ring(0, wrote=True)
    assert len(wakes) == 1, "once for each time that it is armed"


def test_bell_stays_armed_until_somebody_rings(bells: list[Doorbell]) -> None:
    mine, other, _ = bells
    seen = mine.arm(wants_room=False)
    assert seconds_asleep(mine, seen, 0.01) >= 0.01
    assert mine.is_armed(seen, wants_room=False)
    assert not mine.is_armed(seen, wants_room=True), "nobody would ring for room"
    other.ring(0, wrote=False)
    assert mine.is_armed(seen, wants_room=False)
    other.ring(0, wrote=True)
    assert not mine.is_armed(seen, wants_room=False)
    seen = mine.arm(wants_room=True)
    assert mine.is_armed(seen, wants_room=False)
    other.ring_all()
    assert not mine.is_armed(seen, wants_room=False)


def test_who_wants_room_wakes_who_sleeps_for_records(bells: list[Doorbell], monkeypatch: pytest.MonkeyPatch) -> None:
    wakes: list[int] = []
    monkeypatch.setattr(Futex, "wake", lambda futex, index: wakes.append(index))
    mine = bells[0]
    seen = mine.arm(wants_room=False)
    mine.want_room()
    assert len(wakes) == 1
    assert not mine.is_armed(seen, wants_room=False)
    mine.want_room()
    mine.arm(wants_room=True)
    mine.want_room()
    assert len(wakes) == 1, "nobody sleeps, or for room too"


def test_own_threads_are_woken_too(bells: list[Doorbell]) -> None:
    mine = bells[0]
    seen = mine.arm(wants_room=False)
    threading.Timer(0.02, mine.ring_here).start()
    assert seconds_asleep(mine, seen, _LONG_S) < _LONG_S / 2


def test_without_futex_there_are_naps(bells: list[Doorbell], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Futex, "is_supported", staticmethod(lambda: False))
    bell = Doorbell(bells[0]._area, 0)
    assert seconds_asleep(bell, bell.arm(wants_room=False), _LONG_S) < _LONG_S / 2
    bells[1].ring(0, wrote=True)
