"""Ranks that wait for each other in different groups: an error at once, and none where one of them can still come."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing.pool
import queue
import sched
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from failing import Caught, attempt, expect, group_works, ranks_named
from lockstep.comm import deadlock
from lockstep.comm.work import Runner
from lockstep.errors import CollectiveMismatch, CollectiveTimeout
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


def one_receives_by_another_tag() -> None:
    dist.send(torch.ones(LARGE // 4), 1, tag=1) if dist.get_rank() == 0 else dist.recv(torch.ones(LARGE // 4), 0)


def one_sends_in_another_group() -> None:
    group = dist.new_group()
    tensor = torch.ones(LARGE // 4)
    dist.send(tensor, 1, group=group) if dist.get_rank() == 0 else dist.recv(tensor, 0)


@pytest.mark.parametrize(
    "call",
    [
        both_receive,
        both_send,
        one_receives,
        one_receives_in_another_group,
        one_receives_by_another_tag,
        one_sends_in_another_group,
    ],
)
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


def send_a_message() -> None:
    dist.send(torch.ones(2), 1)


def by_a_timer() -> None:
    threading.Timer(LONG_S, send_a_message).start()


def by_a_scheduler() -> None:
    scheduler = sched.scheduler()
    scheduler.enter(LONG_S, 0, send_a_message)
    threading.Thread(target=scheduler.run).start()


def by_an_event_loop() -> None:
    async def come_late() -> None:
        await asyncio.sleep(LONG_S)
        send_a_message()

    threading.Thread(target=asyncio.run, args=(come_late(),)).start()


def by_a_loop_that_calls_later() -> None:
    loop = asyncio.new_event_loop()
    loop.call_later(LONG_S, send_a_message)
    loop.call_later(LONG_S, loop.stop)
    threading.Thread(target=loop.run_forever).start()


def behind_a_call_of_a_library() -> None:
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(time.sleep, LONG_S)
    pool.submit(send_a_message)
    pool.shutdown(wait=False)


def by_a_callback() -> None:
    pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    pool.submit(time.sleep, LONG_S).add_done_callback(lambda _: send_a_message())
    pool.shutdown(wait=False)


def by_a_callback_of_a_pool() -> None:
    pool = multiprocessing.pool.ThreadPool(1)
    pool.apply_async(time.sleep, (LONG_S,), callback=lambda _: send_a_message())
    pool.close()


def by_a_server() -> None:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            send_a_message()
            threading.Thread(target=self.server.shutdown).start()

    server = socketserver.TCPServer(("localhost", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    subprocess.Popen([sys.executable, "-c", ASK, str(LONG_S), str(server.server_address[1])])


ASK = "import socket, sys, time; time.sleep(float(sys.argv[1])); socket.create_connection(('localhost', sys.argv[2]))"


def send_late(send: Callable[[], None]) -> tuple[bool, bool]:
    """Rank 1 waits for a message of rank 0, which waits for all in a barrier and sends it meanwhile."""
    received = torch.zeros(2)
    dist.barrier()
    if dist.get_rank() == 0:
        send()
    else:
        dist.recv(received, 0)
    dist.barrier()
    return dist.get_rank() == 0 or received.sum().item() == 2.0, group_works()


@pytest.mark.parametrize(
    "send",
    [
        by_a_timer,
        by_a_scheduler,
        by_an_event_loop,
        by_a_loop_that_calls_later,
        behind_a_call_of_a_library,
        by_a_callback,
        by_a_callback_of_a_pool,
        by_a_server,
    ],
)
def test_what_calls_back_later_can_still_send(send: Callable[[], None]) -> None:
    assert run_ranks(send_late, 2, send) == [(True, True)] * 2


def answer_from_a_library() -> tuple[bool, bool]:
    """A thread of a library receives a request and answers it later."""
    code = """
def serve():
    tensor = torch.zeros(2)
    dist.recv(tensor, 1)
    time.sleep(delay_s)
    dist.send(tensor + 1, 1)
"""
    library = {"torch": torch, "dist": dist, "time": time, "delay_s": LONG_S}
    exec(compile(code, "/lib/site-packages/library.py", "exec"), library)
    answer = torch.zeros(2)
    if dist.get_rank() == 0:
        threading.Thread(target=library["serve"]).start()  # type: ignore[arg-type]
    else:
        dist.send(torch.ones(2), 0)
        dist.recv(answer, 0)
    dist.barrier()
    return dist.get_rank() == 0 or answer.sum().item() == 4.0, group_works()


def test_thread_of_a_library_that_has_communicated_can_still_send() -> None:
    assert run_ranks(answer_from_a_library, 2) == [(True, True)] * 2


def try_for_a_while() -> tuple[bool, bool]:
    """Rank 0 waits for a message with a limit, and then sends what rank 1 needs for it."""
    tensor = torch.ones(2)
    if dist.get_rank() == 0:
        expected = dist.irecv(tensor, 1)
        with pytest.raises(CollectiveTimeout):
            expected.wait(timedelta(seconds=2 + LONG_S))
        dist.send(torch.ones(2), 1)
        expected.wait()
    else:
        dist.recv(tensor, 0)
        dist.send(tensor + 1, 0)
    return tensor.sum().item() == 4.0 - 2.0 * dist.get_rank(), group_works()


def test_message_that_is_waited_for_with_a_limit_is_no_standstill() -> None:
    assert run_ranks(try_for_a_while, 2) == [(True, True)] * 2


def go_round_beside_threads_of_libraries() -> Caught:
    """Idle and busy threads that cannot call a collective."""
    idle: queue.Queue[None] = queue.Queue()
    loop = asyncio.new_event_loop()  # as that of fsspec: without tasks
    threading.Thread(target=loop.run_forever, daemon=True).start()
    for target, args in ((idle.get, ()), (threading.Event().wait, (10 * LONG_S,))):
        threading.Thread(target=target, args=args, daemon=True).start()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(int).result()
        loader = iter(DataLoader(torch.arange(8), num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]
        next(loader)
        caught = go_round(False)
    idle.put(None)
    loop.call_soon_threadsafe(loop.stop)
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


class Confirmed:
    """Notes when the last wait was confirmed."""

    at_ns = 0

    def wait_of(self, rank: int) -> None: ...

    def publish_wait(self, text: str) -> None: ...

    def confirm_wait(self, time_ns: int) -> None:
        self.at_ns = time_ns

    def withdraw_wait(self) -> None: ...


def test_wait_is_confirmed_from_before_the_caller_looked_whether_it_is_over() -> None:
    """A rank that is stopped between the two may miss what came meanwhile."""
    waits: Any = Confirmed()
    detector = deadlock.DeadlockDetector(waits, [0, 1], 0, "a group", Runner("unused"), lambda: "a call")
    detector.look([1], 10.0, 60.0)
    caller_looked_ns = time.monotonic_ns()
    detector.look([1], 10.0, 60.0)
    assert 0 < waits.at_ns <= caller_looked_ns


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


def make_a_group_while_one_rank_reduces() -> Caught:
    ranks = range(dist.get_world_size())
    return attempt((lambda: dist.all_reduce(torch.ones(3))) if dist.get_rank() == 1 else lambda: dist.new_group(ranks))


def test_rank_in_a_collective_and_ranks_that_make_a_group_wait_for_each_other() -> None:
    for caught in run_ranks(make_a_group_while_one_rank_reduces, 3):
        expect(caught, CollectiveMismatch, (1,), "the ranks wait for each other", "new_group([0, 1, 2]) at ")
        assert "rank 1 (" in str(caught.error)
        assert "all_reduce(float32[3], SUM) at " in str(caught.error)
