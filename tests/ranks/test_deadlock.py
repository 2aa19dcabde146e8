"""Ranks that wait for each other in different groups: an error at once, and none where one of them can still come."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from failing import Caught, attempt, expect, group_works, ranks_named
from lockstep.comm import deadlock
from lockstep.comm.work import Runner
from lockstep.errors import CollectiveMismatch
from lockstep.testing import run_ranks

# Longer than it takes to be sure of a deadlock.
LONG_S = 1.0


def wait_in(group: Any, is_async: bool) -> Callable[[], object]:
    def call() -> None:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=is_async)
        if is_async:
            work.wait()

    return call


def go_round(is_async: bool) -> Caught:
    """Rank 0 waits for rank 1, that for rank 2, that for rank 0; rank 3 is not concerned."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
    dist.barrier()
    if dist.get_rank() == 3:
        return Caught(None, 0.0, 0)
    return attempt(wait_in(pairs[dist.get_rank()], is_async))


def check_round(outcomes: list[Caught]) -> None:
    for rank, outcome in enumerate(outcomes[:3]):
        expect(outcome, CollectiveMismatch, (), "wait for each other", "of ranks [0, 1]", "of ranks [0, 2]", "in call")
        assert ranks_named(outcome.error) == {peer: outcomes[peer].pid for peer in range(3)}, rank
    assert outcomes[3].error is None


def test_three_ranks_in_a_circle() -> None:
    check_round(run_ranks(go_round, 4, False))


def test_circle_of_asynchronous_calls() -> None:
    check_round(run_ranks(go_round, 4, True))


LARGE = 4 << 20  # bytes, too many to be sent before they are asked for


def both_receive() -> None:
    dist.recv(torch.ones(2), 1 - dist.get_rank())


def both_send() -> None:
    dist.send(torch.ones(LARGE // 4), 1 - dist.get_rank())


def one_receives() -> None:
    dist.recv(torch.ones(2), 1) if dist.get_rank() == 0 else dist.barrier()


def one_receives_in_another_group() -> None:
    group = dist.new_group()
    dist.send(torch.ones(LARGE // 4), 1, group=group) if dist.get_rank() == 0 else dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize("call", [both_receive, both_send, one_receives, one_receives_in_another_group])
def test_messages_that_nobody_sends_or_receives(call: Callable[[], None]) -> None:
    for outcome in run_ranks(call_together, 2, call):
        expect(outcome, CollectiveMismatch, (), "wait for each other", "rank 0", "rank 1", "Send before you wait")


def call_together(call: Callable[[], None]) -> Caught:
    dist.barrier()
    return attempt(call)


def exchange_slowly() -> bool:
    """Messages that are under way while their ranks wait for something else, for longer than it takes to be sure."""
    mine, theirs = torch.full((LARGE // 4,), 1.0 + dist.get_rank()), torch.zeros(LARGE // 4)
    pause = threading.Event()
    if dist.get_rank() == 0:
        sent = dist.isend(mine, 1)
        expected = dist.irecv(theirs, 1)
        dist.barrier()
        expected.wait()
        sent.wait()
        dist.send(mine, 1)  # to a rank that computes
        dist.recv(theirs, 1)  # of one that computes
    else:
        pause.wait(LONG_S)
        dist.recv(theirs, 0)
        dist.barrier()
        pause.wait(LONG_S)
        dist.send(mine, 0)
        pause.wait(LONG_S)
        dist.recv(theirs, 0)
        pause.wait(LONG_S)
        dist.send(mine, 0)
    return bool((theirs == 2.0 - dist.get_rank()).all()) and group_works()


def test_messages_that_are_under_way_are_no_standstill() -> None:
    assert run_ranks(exchange_slowly, 2) == [True, True]


def call_from_a_thread() -> tuple[bool, bool]:
    """Each waits in another group for the other; but rank 0 has a thread that comes, if late."""
    first, second = dist.new_group(), dist.new_group()
    dist.barrier()
    is_there = threading.Event()
    if dist.get_rank() == 0:

        def come_late() -> None:
            dist.barrier()  # the others know from here on that there are two
            is_there.set()
            threading.Event().wait(LONG_S)
            dist.all_reduce(torch.ones(2), group=second)

        thread = threading.Thread(target=come_late)
        thread.start()
        is_there.wait()
        dist.all_reduce(torch.ones(2), group=first)
        thread.join()
    else:
        dist.barrier()
        dist.all_reduce(torch.ones(2), group=second)
        dist.all_reduce(torch.ones(2), group=first)
    return True, group_works()


def test_rank_with_two_threads_can_still_come() -> None:
    assert run_ranks(call_from_a_thread, 2) == [(True, True)] * 2


def call_first_from_a_thread() -> tuple[bool, bool]:
    """As before, but the first collective of the thread comes late."""
    data, sync = dist.new_group(), dist.new_group()
    dist.barrier()
    if dist.get_rank() == 0:

        def come_late() -> None:
            threading.Event().wait(LONG_S)
            dist.all_reduce(torch.ones(2), group=data)

        thread = threading.Thread(target=come_late)
        thread.start()
        dist.barrier(sync)
        thread.join()
    else:
        dist.all_reduce(torch.ones(2), group=data)
        dist.barrier(sync)
    return True, group_works()


def test_thread_may_call_its_first_collective_late() -> None:
    assert run_ranks(call_first_from_a_thread, 2) == [(True, True)] * 2


def go_round_beside_threads_of_libraries() -> Caught:
    """Idle and busy threads that cannot call a collective."""
    idle: queue.Queue[None] = queue.Queue()
    for target, args in ((idle.get, ()), (threading.Event().wait, (10 * LONG_S,))):
        threading.Thread(target=target, args=args, daemon=True).start()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(int).result()
        loader = iter(DataLoader(torch.arange(8), num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]
        next(loader)
        caught = go_round(False)
    idle.put(None)
    return caught


def test_circle_beside_threads_of_libraries() -> None:
    check_round(run_ranks(go_round_beside_threads_of_libraries, 4))


def queue_and_wait() -> tuple[bool, bool]:
    """Asynchronous calls in one order, waits in another: no deadlock, because each call is on its way."""
    first, second = dist.new_group(), dist.new_group()
    dist.barrier()
    groups = [first, second] if dist.get_rank() == 0 else [second, first]
    works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in groups]
    for work in works:
        work.wait()
    if dist.get_rank() == 1:
        threading.Event().wait(LONG_S)  # rank 0 waits for a rank that computes
    dist.all_reduce(torch.ones(2), group=first)
    return True, group_works()


def test_rank_that_computes_is_no_standstill() -> None:
    assert run_ranks(queue_and_wait, 2) == [(True, True)] * 2


class NobodyWaits:
    """What the ranks publish, where no other waits."""

    def wait_of(self, rank: int) -> None:
        return None

    def publish_wait(self, text: str) -> None: ...

    def confirm_wait(self, time_ns: int) -> None: ...

    def withdraw_wait(self) -> None: ...


@pytest.mark.parametrize("has_other_callers", [False, True])
def test_long_wait_is_looked_at_twice_a_second(has_other_callers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever suspects a circle waits until every rank of it has confirmed its wait, in a look."""
    monkeypatch.setattr(deadlock, "_has_other_callers", has_other_callers)
    waits: Any = NobodyWaits()
    detector = deadlock.DeadlockDetector(waits, [0, 1], 0, "a group", Runner("unused"), lambda: "a call")
    assert detector.look([1], 10.0, 60.0) <= 0.5
