"""What waiting costs: a rank that waits sleeps, until what it waits for wakes it."""

from __future__ import annotations

import resource
import time

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import p2p
from lockstep.shm import sync
from lockstep.shm.futex import Futex
from lockstep.testing import run_ranks

pytestmark = pytest.mark.skipif(not Futex.is_supported(), reason="no futex on this machine")

_WAIT_S = 0.5
_NEVER_S = 25.0
_LARGE = 3 << 20  # elements: 12 MiB, more than the memory through which messages travel


def _sleeps() -> int:
    """How often this process has gone to sleep so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def sleeps_in_a_wait(kind: str) -> int:
    """Of rank 1, while it waits for rank 0."""
    tensor = torch.zeros(1)
    dist.barrier()
    before = _sleeps()
    if dist.get_rank() == 0:
        time.sleep(_WAIT_S)
        if kind != "barrier":
            dist.send(tensor, 1)
    elif kind == "recv":
        dist.recv(tensor, 0)
    elif kind == "irecv":
        work = dist.irecv(tensor, 0)
        assert work is not None
        time.sleep(_WAIT_S)  # as if it computed
        work.wait()
    if kind == "barrier":
        dist.barrier()
    count = _sleeps() - before
    dist.barrier()
    return count


@pytest.mark.parametrize("kind", ["barrier", "recv", "irecv"])
def test_who_waits_wakes_up_rarely(kind: str) -> None:
    """A look every 2 ms makes 250 in this time, a nap of half a millisecond 1000 in each thread."""
    counts = run_ranks(sleeps_in_a_wait, 2, kind)
    assert counts[1] < 120


def _look_never() -> None:
    """Nobody wakes up by himself in this process."""

    def never(start: float, now: float, timeout_s: float) -> float:
        return now + _NEVER_S

    sync.next_look = p2p.next_look = never  # type: ignore[attr-defined]


def seconds_of_messages(numel: int) -> float:
    """There and back, each begun when the other has long been asleep."""
    look, look_p2p = sync.next_look, p2p.next_look  # type: ignore[attr-defined]
    rank = dist.get_rank()
    tensor = torch.arange(numel, dtype=torch.float32) if rank == 0 else torch.zeros(numel)
    dist.barrier()
    _look_never()
    try:
        start = time.monotonic()
        for turn in (0, 1):
            if rank == turn:
                time.sleep(0.05)
                dist.send(tensor, 1 - rank)
            else:
                dist.recv(tensor, 1 - rank)
        dist.barrier()
        took = time.monotonic() - start
    finally:
        sync.next_look, p2p.next_look = look, look_p2p  # type: ignore[attr-defined]
    assert torch.equal(tensor, torch.arange(numel, dtype=torch.float32))
    return took


@pytest.mark.parametrize("numel", [1, _LARGE])
def test_message_wakes_its_receiver_and_room_its_sender(numel: int) -> None:
    assert max(run_ranks(seconds_of_messages, 2, numel)) < _NEVER_S - 5


def seconds_until_moved() -> float:
    """A receive that nobody waits for finishes when its message comes."""
    look, look_p2p = sync.next_look, p2p.next_look  # type: ignore[attr-defined]
    tensor = torch.zeros(_LARGE)
    dist.barrier()
    _look_never()
    try:
        start = time.monotonic()
        if dist.get_rank() == 0:
            time.sleep(0.1)
            dist.send(tensor + 1, 1)
        else:
            work = dist.irecv(tensor, 0)
            assert work is not None
            while not work.is_completed() and time.monotonic() - start < _NEVER_S:
                time.sleep(0.001)
            assert bool((tensor == 1).all())
        dist.barrier()
        return time.monotonic() - start
    finally:
        sync.next_look, p2p.next_look = look, look_p2p  # type: ignore[attr-defined]


def test_message_wakes_the_thread_that_nobody_waits_with() -> None:
    assert max(run_ranks(seconds_until_moved, 2)) < _NEVER_S - 5
