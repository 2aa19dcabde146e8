"""What waiting costs: a rank that waits sleeps, until what it waits for wakes it."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from failing import Caught, attempt, kill_self
from lockstep.comm import p2p
from lockstep.errors import CollectiveAborted, RankLost
from lockstep.shm import sync
from lockstep.shm.futex import Futex
from lockstep.shm.mailbox import Mailbox
from lockstep.testing import WorkerDied, limit_s, run_ranks

pytestmark = pytest.mark.skipif(not Futex.is_supported(), reason="no futex on this machine")

_WAIT_S = 0.5
_NEVER_S = 25.0
_SOON_S = 0.1  # long enough for the others to be asleep
_NUM_GROUPS = 50
_EAGER_BYTES, _NUM_MESSAGES = 16 << 10, 32  # more of these messages than a ring takes
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


def mailbox_sleeps_in_a_wait() -> tuple[list[float], float]:
    """Of rank 1, while it waits for a message of rank 0: the longest that each may last, and how long it waited."""
    tensor = torch.zeros(1)
    timeouts_s: list[float] = []
    sleep = Mailbox.sleep

    def note(mailbox: Mailbox, seen: int, timeout_s: float, poll_s: float) -> None:
        timeouts_s.append(timeout_s)
        sleep(mailbox, seen, timeout_s, poll_s)

    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() == 0:
        time.sleep(_WAIT_S)
        dist.send(tensor, 1)
    else:
        with mock.patch.object(Mailbox, "sleep", note):
            dist.recv(tensor, 0)
    return timeouts_s, time.monotonic() - start


def test_receiver_wakes_up_once_before_its_first_look() -> None:
    """See [Note: missed wake-ups]: it sleeps for 2 ms, until the first look, and until the message comes."""
    timeouts_s, waited_s = run_ranks(mailbox_sleeps_in_a_wait, 2)[1]
    assert len(timeouts_s) <= 4 + waited_s, "it looks once a second"
    # Where the machine is busy, the message has come before some of them.
    assert all(timeout_s <= sync.MISSED_AFTER_S for timeout_s in timeouts_s[:1])
    assert all(timeout_s > sync.MISSED_AFTER_S for timeout_s in timeouts_s[1:2])


@contextmanager
def _no_looks() -> Iterator[None]:
    """Nobody wakes up by himself in this process."""
    look, look_p2p = sync.next_look, p2p.next_look  # type: ignore[attr-defined]

    def never(start: float, now: float, timeout_s: float, is_woken: bool = False) -> float:
        return now + _NEVER_S

    sync.next_look = p2p.next_look = never  # type: ignore[attr-defined]
    try:
        yield
    finally:
        sync.next_look, p2p.next_look = look, look_p2p  # type: ignore[attr-defined]


def seconds_of_messages(numel: int) -> float:
    """There and back, each begun when the other has long been asleep."""
    rank = dist.get_rank()
    tensor = torch.arange(numel, dtype=torch.float32) if rank == 0 else torch.zeros(numel)
    dist.barrier()
    with _no_looks():
        start = time.monotonic()
        for turn in (0, 1):
            if rank == turn:
                time.sleep(0.05)
                dist.send(tensor, 1 - rank)
            else:
                dist.recv(tensor, 1 - rank)
        dist.barrier()
        took = time.monotonic() - start
    assert torch.equal(tensor, torch.arange(numel, dtype=torch.float32))
    return took


@pytest.mark.parametrize("numel", [1, _LARGE])
def test_message_wakes_its_receiver_and_room_its_sender(numel: int) -> None:
    assert max(run_ranks(seconds_of_messages, 2, numel)) < _NEVER_S - 5


def seconds_until_moved() -> float:
    """A receive that nobody waits for finishes when its message comes."""
    tensor = torch.zeros(_LARGE)
    dist.barrier()
    with _no_looks():
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


def test_message_wakes_the_thread_that_nobody_waits_with() -> None:
    assert max(run_ranks(seconds_until_moved, 2)) < _NEVER_S - 5


def seconds_of_sends_beside_a_sleeper() -> float:
    """Rank 0 sends more than there is room for, and returns; all that is left to move it is a thread that receives."""
    messages = [torch.full((_EAGER_BYTES,), number, dtype=torch.uint8) for number in range(_NUM_MESSAGES)]
    dist.barrier()
    with _no_looks():
        start = time.monotonic()
        if dist.get_rank() == 0:
            thread = threading.Thread(target=dist.recv, args=(torch.zeros(1), 1))
            thread.start()
            time.sleep(_SOON_S)
            works = [dist.isend(message, 1) for message in messages]
            thread.join()
            for work in works:
                assert work is not None
                work.wait()
        else:
            time.sleep(3 * _SOON_S)
            for message in messages:
                received = torch.empty_like(message)
                dist.recv(received, 0)
                assert torch.equal(received, message)
            dist.send(torch.zeros(1), 0)
        dist.barrier()
        return time.monotonic() - start


def test_room_wakes_who_slept_for_a_message_alone() -> None:
    assert max(run_ranks(seconds_of_sends_beside_a_sleeper, 2)) < _NEVER_S - 5


# ---- trouble wakes those that sleep ----------------------------------------------------------------


def _leave() -> None:
    dist.destroy_process_group()
    raise SystemExit  # a worker of the tests ends its job by that, and lives on


def _receive_from_last() -> None:
    dist.recv(torch.zeros(1), dist.get_world_size() - 1)


def _receive_later() -> None:
    work = dist.irecv(torch.zeros(1), dist.get_world_size() - 1)
    assert work is not None
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()


ENDS: dict[str, Callable[[], None]] = {"killed": kill_self, "left": _leave}
WAITS: dict[str, Callable[[], object]] = {
    "barrier": dist.barrier,
    "recv": _receive_from_last,
    "irecv": _receive_later,
}


def lose_the_last(end: str, wait: str) -> Caught:
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(_SOON_S)
        ENDS[end]()
    with _no_looks():
        return attempt(WAITS[wait])


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("end", ENDS)
def test_end_of_a_rank_wakes_all_that_wait_for_it(end: str, wait: str) -> None:
    """See [Note: alarm]: none of them would look by itself."""
    *others, victim = run_ranks(lose_the_last, 3, end, wait, expect_errors=True)
    assert isinstance(victim, WorkerDied if end == "killed" else SystemExit)
    for outcome in others:
        assert type(outcome.error) is RankLost, outcome
        assert outcome.error.culprits == (2,)
        assert outcome.seconds < limit_s(1.0) + _SOON_S


def shut_down_meanwhile() -> Caught:
    """A thread shuts the group down in which another one waits."""
    group = dist.new_group()
    dist.barrier()
    if dist.get_rank() == 1:
        dist.barrier()
        return Caught(None, 0.0, 0)
    closer = threading.Timer(_SOON_S, dist.destroy_process_group, [group])
    closer.start()
    with _no_looks():
        caught = attempt(lambda: dist.barrier(group))
    closer.join()
    dist.barrier()
    return caught


@pytest.mark.skipif(
    not hasattr(dist.AllreduceOptions(), "asyncOp"),
    reason="torch 2.6 does not say that the caller waits, and shutdown lets calls that others may wait for finish",
)
def test_shutdown_wakes_the_thread_that_waits() -> None:
    caught = run_ranks(shut_down_meanwhile, 2)[0]
    assert type(caught.error) is CollectiveAborted, caught
    assert caught.seconds < limit_s(1.0) + _SOON_S


# ---- one watch for all groups ----------------------------------------------------------------------


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def descriptors_of_groups() -> tuple[int, int, int]:
    """With one group, with many, and when these are gone."""
    group = dist.new_group()
    dist.barrier(group)
    before = _descriptors()
    groups = [dist.new_group() for _ in range(_NUM_GROUPS)]
    for one in groups:
        dist.barrier(one)
    between = _descriptors()
    for one in groups:
        dist.destroy_process_group(one)
    return before, between, _descriptors()


def test_descriptors_do_not_grow_with_groups() -> None:
    """See [Note: one sentry]: it was one for each peer in each group."""
    for before, between, after in run_ranks(descriptors_of_groups, 3):
        assert before == between == after
