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

from lockstep.errors import SharedMemoryError
from lockstep.shm import large_slots
from lockstep.shm.control_blocks import ControlBlocks
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
        patch.setattr(large_slots, "_KEPT_ON_A_HOST", 2 * limit)
        yield


def right_sum(group: Any, value: float) -> bool:
    tensor = torch.full((NUMEL,), value * (dist.get_rank() + 1))
    dist.all_reduce(tensor, group=group)
    return bool((tensor == 3 * value).all())


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


@groups_that_keep_memory(2)
def use_together(rounds: int) -> int:
    groups = [dist.new_group() for _ in range(5)]
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


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> list[LargeSlots]:
    """Those of four groups of three ranks each, seen by rank 0 of all."""
    monkeypatch.setattr(large_slots, "_kept", type(large_slots._kept)())
    monkeypatch.setattr(large_slots, "_KEPT_ON_A_HOST", 6)
    made = []
    for _ in range(4):
        blocks = ControlBlocks(Segment.create(ControlBlocks.size_bytes(3)), 0, 3)
        data = Segment.create(3 * (8 << 10))
        made.append(LargeSlots([data.tensor(rank * (8 << 10), 8 << 10) for rank in range(3)], 4 << 10, blocks))
    return made


def finish(slots: LargeSlots, *ranks: int) -> None:
    """As if these ranks had finished what this one began."""
    for rank in ranks:
        blocks = slots._blocks
        blocks.words[blocks._starts[rank] // 8 + 3] = slots._num_begun


def test_slots_keep_what_a_peer_still_reads(slots: list[LargeSlots]) -> None:
    for each in slots:
        each.begin()
        each.parts[0].fill_(7)
    finish(slots[0], 0, 1)
    finish(slots[1], 0, 1, 2)
    slots[3].begin()
    assert [int(each.parts[0][0]) for each in slots] == [7, 0, 7, 7]
    finish(slots[0], 2)
    slots[3].begin()
    assert [int(each.parts[0][0]) for each in slots] == [0, 0, 7, 7]


def test_slots_are_given_back_once(slots: list[LargeSlots]) -> None:
    for each in slots:
        each.begin()
        each.finish()
        finish(each, 1, 2)
    assert len(large_slots._kept) == 2
    slots[0].begin()
    slots[0].parts[0].fill_(3)
    assert set(large_slots._kept) == {slots[0], slots[3]}
    slots[3].close()
    assert set(large_slots._kept) == {slots[0]}


def test_memory_that_is_gone_is_an_error(slots: list[LargeSlots], monkeypatch: pytest.MonkeyPatch) -> None:
    for each in slots:
        each.begin()
        finish(each, 0, 1, 2)
    monkeypatch.setattr("lockstep.libc.advise", lambda *_: False)
    with pytest.raises(SharedMemoryError, match=r"cannot reserve 0\.0 MiB of shared memory again"):
        slots[0].begin()


def test_a_kernel_that_cannot_take_memory_again_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = Segment.create(8 << 10).tensor(0, 8 << 10)
    piece.fill_(5)
    monkeypatch.setattr("lockstep.libc.advise", lambda _address, _size, advice: advice != 23)
    assert not give_back(piece)
    assert int(piece[-1]) == 5
