"""Many groups with large tensors: only those used last keep the memory of their slots, and all give right answers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from failing import Caught, attempt, expect
from lockstep.errors import CollectiveAborted, CollectiveMismatch, RankLost, SetupError, SharedMemoryError
from lockstep.shm import large_slots
from lockstep.shm.control_blocks import SharedControlBlocks
from lockstep.shm.large_slots import LargeSlots
from lockstep.shm.segment import Segment, give_back
from lockstep.testing import run_ranks

NUMEL = 300_000
LARGE_SLOTS_KIB = 8 << 10  # of a group of two ranks


def resident_kib() -> int:
    """Memory of all segments of this process that is there, in KiB."""
    of_segments = re.compile(r"^\S+ \S+ \S+ \S+ \S+ +/memfd:lockstep.*?^Rss: +(\d+) kB", re.MULTILINE | re.DOTALL)
    return sum(int(number) for number in of_segments.findall(Path("/proc/self/smaps").read_text()))


@contextlib.contextmanager
def groups_that_keep_memory(limit: int) -> Iterator[None]:
    """So many groups of this rank, one of several of a pool, keep the memory of their slots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_slots, "_KEPT_PAIRS", limit)
        yield


def right_sum(group: Any, value: float) -> bool:
    tensor = torch.full((NUMEL,), value * (dist.get_rank() + 1))
    dist.all_reduce(tensor, group=group)
    return bool((tensor == value * sum(range(1, dist.get_world_size() + 1))).all())


@groups_that_keep_memory(2)
def use_by_turns() -> tuple[list[bool], list[int]]:
    groups = [dist.new_group() for _ in range(6)]
    answers, resident = [], []
    for _ in range(2):
        for number, group in enumerate(groups):
            answers.append(right_sum(group, number + 0.5))
            dist.barrier()
            resident.append(resident_kib())
    return answers, resident


def test_only_those_used_last_keep_memory() -> None:
    for answers, resident in run_ranks(use_by_turns, 2):
        assert all(answers)
        # Two groups keep theirs; of the next both ranks must have made it before it may go.
        assert max(resident) < 4 * LARGE_SLOTS_KIB, resident


def use_many() -> tuple[list[bool], list[int]]:
    answers, resident = [], []
    for number in range(10):
        answers.append(right_sum(dist.new_group(), number + 0.5))
        dist.barrier()
        resident.append(resident_kib())
    return answers, resident


def test_a_further_group_of_many_ranks_takes_little() -> None:
    """Two of four ranks each have 16 MiB of slots; all others together no more than their control segments."""
    for answers, resident in run_ranks(use_many, 4):
        assert all(answers)
        assert resident[-1] - resident[2] <= 7 * (3 << 10), resident
        assert resident[-1] - resident[0] <= 9 * (8 << 10), resident


@groups_that_keep_memory(2)
def use_together(rounds: int) -> int:
    groups = [dist.new_group() for _ in range(5)]
    if dist.get_rank() == 0:  # From now on the ranks have begun different numbers of large operations.
        with pytest.raises(CollectiveMismatch):
            dist.all_reduce(torch.ones(NUMEL), group=groups[0])
    else:
        with pytest.raises(CollectiveMismatch):
            dist.barrier(groups[0])
    wrong = 0
    for round_number in range(rounds):
        tensors = [torch.full((NUMEL,), float(round_number + number)) for number in range(len(groups))]
        order = range(len(groups)) if round_number % 2 else reversed(range(len(groups)))
        works = [(number, dist.all_reduce(tensors[number], group=groups[number], async_op=True)) for number in order]
        for number, work in works:
            work.wait()
            wrong += int((tensors[number] != 2.0 * (round_number + number)).sum())
        gathered = [torch.empty(NUMEL) for _ in range(2)]
        dist.all_gather(gathered, tensors[0] + dist.get_rank(), group=groups[round_number % 5])
        wrong += sum(int((part != tensors[0] + rank).sum()) for rank, part in enumerate(gathered))
    return wrong


def test_nothing_is_lost_where_groups_work_at_once() -> None:
    assert run_ranks(use_together, 2, 20) == [0, 0]


def memory_is_not_had_again() -> list[Caught]:
    """Rank 1 gave the memory of its slots back, and something else has taken it."""
    group: Any = dist.new_group()
    assert right_sum(group, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(group.engine.team._large, "_has_memory", False)
            patch.setattr(large_slots, "populate", refuse)
        first = attempt(lambda: right_sum(group, 1.0))
    return [first, attempt(lambda: dist.barrier(group))]


def refuse(_: torch.Tensor) -> None:
    raise SharedMemoryError("no memory is left")


def test_a_rank_that_cannot_have_its_memory_again_is_named() -> None:
    """The others waited for it, and took its next call for damaged memory."""
    for rank, (first, second) in enumerate(run_ranks(memory_is_not_had_again, 3)):
        if rank == 1:
            assert type(first.error) is SetupError
            assert str(first.error) == "no memory is left"
        else:
            expect(first, RankLost, (1,), "rank 1 (", "SetupError: no memory is left")
        expect(second, CollectiveAborted if rank == 1 else RankLost, (1,), "SetupError: no memory is left")


segments: dict[LargeSlots, Segment] = {}  # the control segments of those that a test has


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> list[LargeSlots]:
    """Those of four groups of three ranks each, seen by rank 0 of all."""
    monkeypatch.setattr(large_slots, "_kept", type(large_slots._kept)())
    segments.clear()
    for _ in range(4):
        control = Segment.create(SharedControlBlocks.size_bytes(3))
        data = Segment.create(3 * (8 << 10))
        parts = [data.tensor(rank * (8 << 10), 8 << 10) for rank in range(3)]
        segments[LargeSlots(parts, 4 << 10, SharedControlBlocks(control, 0, 3))] = control
    return list(segments)


def finish(slots: LargeSlots, step: int, *peers: int) -> None:
    """As if this rank, and these, had finished an operation at that step."""
    slots.finish(step)
    for peer in peers:
        SharedControlBlocks(segments[slots], peer, 3).finish_large(step)


def first_values(slots: list[LargeSlots]) -> list[int]:
    return [int(each.parts[0][0]) for each in slots]


def test_slots_keep_what_a_peer_still_reads(slots: list[LargeSlots]) -> None:
    for each in slots:
        each.begin()
        each.parts[0].fill_(7)
    finish(slots[0], 5, 1)
    finish(slots[1], 6, 1, 2)
    slots[3].begin()
    assert first_values(slots) == [7, 0, 7, 7]
    finish(slots[0], 5, 1, 2)
    slots[3].begin()
    assert first_values(slots) == [0, 0, 7, 7]


def test_slots_keep_what_this_rank_still_reads(slots: list[LargeSlots]) -> None:
    """In an operation, and after one that failed and never finished."""
    finish(slots[0], 5, 1, 2)
    for each in slots:
        each.begin()
        each.parts[0].fill_(7)
    slots[3].begin()
    assert first_values(slots) == [7, 7, 7, 7]


def test_slots_are_given_back_once(slots: list[LargeSlots]) -> None:
    for each in slots:
        each.begin()
        finish(each, 2, 1, 2)
    assert len(large_slots._kept) == 2
    slots[0].begin()
    slots[0].parts[0].fill_(3)
    assert set(large_slots._kept) == {slots[0], slots[3]}
    slots[3].close()
    assert set(large_slots._kept) == {slots[0]}


def test_of_many_ranks_one_group_keeps_memory(slots: list[LargeSlots], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_slots, "_MANY", 2)
    for each in slots:
        each.begin()
        finish(each, 2, 1, 2)
    assert set(large_slots._kept) == {slots[3]}


def test_memory_that_is_gone_is_an_error(slots: list[LargeSlots], monkeypatch: pytest.MonkeyPatch) -> None:
    for each in slots:
        each.begin()
        finish(each, 2, 1, 2)
    monkeypatch.setattr("lockstep.libc.advise", lambda *_: False)
    with pytest.raises(SharedMemoryError, match=r"cannot reserve 0\.0 MiB of shared memory again"):
        slots[0].begin()


def test_a_kernel_that_cannot_take_memory_again_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = Segment.create(8 << 10).tensor(0, 8 << 10)
    piece.fill_(5)
    monkeypatch.setattr("lockstep.libc.advise", lambda _address, _size, advice: advice != 23)
    assert not give_back(piece)
    assert int(piece[-1]) == 5
