"""Several threads of one rank, and calls that wait mixed with calls that do not."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from failing import attempt, expect, group_works
from lockstep.comm.work import PendingWork, Runner
from lockstep.errors import CollectiveMismatch
from lockstep.testing import run_ranks

ROUNDS = 40
SIZES = (1, 7, 5_000, 40_000)


class Threads:
    """Threads whose errors are raised again where they are joined."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, function: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            try:
                function(*arguments)
            except BaseException as error:
                self._errors.append(error)

        thread = threading.Thread(target=run)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a thread hangs"
        for error in self._errors:
            raise error


def reduce_in_rounds(group: dist.ProcessGroup, members: list[int], seed: int) -> None:
    """All reductions of one thread in its group: sums of ranks, of sizes that differ from thread to thread."""
    sizes = random.Random(seed)
    rank = dist.get_rank()
    for number in range(ROUNDS):
        numel = sizes.choice(SIZES)
        tensor = torch.full((numel,), float(rank + number))
        dist.all_reduce(tensor, group=group)
        expected = float(sum(members) + number * len(members))
        if not bool((tensor == expected).all()):
            raise AssertionError(f"round {number} in {members}: {tensor[0]} instead of {expected}")


def use_overlapping_groups() -> bool:
    """Rank 1 of three is in all groups, and each group has a thread of its own on each of its ranks."""
    all_members = [[0, 1], [1, 2], [0, 1, 2]]
    groups = [dist.new_group(members) for members in all_members]
    threads = Threads()
    for seed, (group, members) in enumerate(zip(groups, all_members, strict=True)):
        if dist.get_rank() in members:
            threads.start(reduce_in_rounds, group, members, seed)
    threads.join()
    return group_works()


def test_overlapping_groups_in_threads_of_their_own() -> None:
    assert run_ranks(use_overlapping_groups, 3) == [True] * 3


def mix_waiting_and_not(seed: int) -> bool:
    """A random run, the same on all ranks: calls that wait, calls that are waited for later, in any order."""
    choices = random.Random(seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pending: list[tuple[dist.Work, torch.Tensor, float]] = []
    for number in range(120):
        tensor = torch.full((choices.choice(SIZES),), float(rank * number))
        expected = float(number * world_size * (world_size - 1) / 2)
        work = dist.all_reduce(tensor, async_op=choices.random() < 0.6)
        if work is None:
            assert bool((tensor == expected).all())
        else:
            pending.append((work, tensor, expected))
        if pending and choices.random() < 0.3:
            # The newest first, so that older ones are done without anybody having waited for them.
            work, tensor, expected = pending.pop(choices.choice([0, -1]))
            work.wait()
            assert work.is_completed()
            assert work.is_success()
            assert bool((tensor == expected).all())
    for work, tensor, expected in pending:
        work.wait()
        assert bool((tensor == expected).all())
    return group_works()


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_calls_that_wait_among_calls_that_do_not(world_size: int) -> None:
    assert run_ranks(mix_waiting_and_not, world_size, world_size) == [True] * world_size


def wait_in_other_threads() -> bool:
    """Whoever made a call, any thread may wait for it, and several may."""
    tensors = [torch.ones(20_000) for _ in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    threads = Threads()

    def wait_for(work: dist.Work, tensor: torch.Tensor) -> None:
        work.wait()
        assert bool((tensor == dist.get_world_size()).all())

    for _ in range(2):
        for work, tensor in zip(works, tensors, strict=True):
            assert work is not None
            threads.start(wait_for, work, tensor)
    threads.join()
    return group_works()


def test_waiting_in_other_threads() -> None:
    assert run_ranks(wait_in_other_threads, 2) == [True] * 2


def fail_in_one_thread() -> tuple[Any, bool]:
    """A mismatch in one group while another group of the same ranks is busy."""
    busy, wrong = dist.new_group(), dist.new_group()
    threads = Threads()
    threads.start(reduce_in_rounds, busy, list(range(dist.get_world_size())), 3)
    caught = attempt(lambda: dist.all_reduce(torch.ones(dist.get_rank() + 1), group=wrong))
    dist.barrier(wrong)
    threads.join()
    return caught, group_works()


def test_failure_in_one_thread_stays_there() -> None:
    for caught, works in run_ranks(fail_in_one_thread, 2):
        expect(caught, CollectiveMismatch, (), "[1]", "[2]", "test_threads.py")
        assert works


def take_turns_in_one_group() -> bool:
    """Two threads share a group: whatever they call matches, so every order is right."""
    threads = Threads()

    def call() -> None:
        for _ in range(ROUNDS):
            tensor = torch.ones(9)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [2.0] * 9

    for _ in range(2):
        threads.start(call)
    threads.join()
    return group_works()


def test_threads_take_turns_in_one_group() -> None:
    assert run_ranks(take_turns_in_one_group, 2) == [True] * 2


def test_group_takes_no_intra_op_threads_from_those_who_compute() -> None:
    """Its thread computes alone. With a team of its own, a rank of eight threads would have sixteen on eight cores."""
    counts: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    runner = Runner("test")
    try:
        work = PendingWork(lambda: counts.append(torch.get_num_threads()), [], lambda: "a call", runner)
        runner.submit(work)
        work.wait()
        thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert [*counts, torch.get_num_threads()] == [1, 3, 3]
    finally:
        runner.close()
        torch.set_num_threads(before)
