"""A folder for shared memory that is too small, or missing: smaller slots, or an error on every rank; never SIGBUS."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
import torch
import torch.distributed as dist

import lockstep
from failing import AT_ONCE_S, Caught, attempt, group_works
from lockstep.errors import SharedMemoryError
from lockstep.shm.bootstrap import Bootstrap
from lockstep.shm.segment import Segment
from lockstep.shm.team import SharedMemoryTeam
from lockstep.shm.terms import Terms
from lockstep.testing import limit_s, run_ranks


def control_kib(world_size: int) -> int:
    """Size of the segment that a group cannot do without."""

    class Asked(Exception):
        pass

    def note_size(_: Bootstrap, size_bytes: int, _layout: Terms) -> NoReturn:
        raise Asked(size_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bootstrap, "open_segment", note_size)
        with pytest.raises(Asked) as caught:
            SharedMemoryTeam.connect(Bootstrap(cast(Any, None), 0, range(world_size), 1.0))
    return -(-int(caught.value.args[0]) // 1024)


@pytest.fixture
def folder(shm_folder: Callable[[int], Path]) -> Callable[[int], Path]:
    """Makes a folder of so many KiB more than the control segment of two ranks takes the one to use."""
    return lambda spare_kib: shm_folder(control_kib(2) + spare_kib)


def reduce_much() -> bool:
    tensor = torch.arange(3_000_000, dtype=torch.float32) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return torch.equal(tensor, torch.arange(3_000_000, dtype=torch.float32) * 3)


def test_slots_get_smaller(folder: Callable[[int], Path], capfd: pytest.CaptureFixture[str]) -> None:
    path = folder(2100)
    assert run_ranks(reduce_much, 2) == [True, True]
    warnings = [line for line in capfd.readouterr().err.splitlines() if "trying slots of" in line]
    assert warnings, "it must be said"
    assert all("cannot reserve" in line and str(path) in line for line in warnings)
    assert os.listdir(path) == []


def reduce_too_much() -> tuple[Caught, bool, Caught]:
    """Small calls keep working where the memory for large ones cannot be had."""
    first = attempt(reduce_much)
    small = torch.ones(100)
    dist.all_reduce(small)
    return first, bool((small == 2).all()), attempt(reduce_much)


def test_no_memory_for_large_calls(folder: Callable[[int], Path]) -> None:
    path = folder(100)
    for first, small_works, again in run_ranks(reduce_too_much, 2):
        for caught in (first, again):
            assert type(caught.error) is SharedMemoryError
            assert f"shared memory in {path}: No space left on device" in str(caught.error)
            assert "point LOCKSTEP_SHM_DIR elsewhere" in str(caught.error)
            assert caught.seconds < limit_s(AT_ONCE_S)
        assert small_works
    assert os.listdir(path) == []


def ask_for_too_much() -> tuple[Caught, bool]:
    return attempt(lambda: lockstep.symmetric_empty(10_000_000)), group_works()


def test_no_symmetric_memory(folder: Callable[[int], Path]) -> None:
    folder(2500)
    for caught, works in run_ranks(ask_for_too_much, 2):
        assert type(caught.error) is SharedMemoryError
        assert "cannot reserve" in str(caught.error)
        assert works


def init_world() -> Caught:
    def init() -> None:
        with lockstep.init():
            pass

    return attempt(init)


def test_no_memory_at_all(folder: Callable[[int], Path]) -> None:
    path = folder(-100)
    for caught in run_ranks(init_world, 2, init=False):
        assert type(caught.error) is SharedMemoryError
        assert f"shared memory in {path}: No space left on device" in str(caught.error)
        assert caught.seconds < limit_s(AT_ONCE_S)
    assert os.listdir(path) == []


def init_without_permission() -> Caught:
    """Rank 1 is not allowed to open the memory: the others hear of it."""
    if os.environ["RANK"] != "1":
        return init_world()

    def refuse(handle: str, size_bytes: int | None = None) -> Segment:
        raise SharedMemoryError(errno.EACCES, "cannot open the shared memory of process 1: Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "attach", refuse)
        return init_world()


def test_one_rank_cannot_open_the_memory() -> None:
    outcomes = run_ranks(init_without_permission, 3, init=False)
    for rank, caught in enumerate(outcomes):
        assert type(caught.error) is SharedMemoryError, caught
        assert "cannot open the shared memory of process 1: Permission denied" in str(caught.error)
        assert caught.seconds < limit_s(AT_ONCE_S)
        if rank != 1:
            assert "rank 1: cannot" in str(caught.error)


def allocate_without_permission() -> tuple[Caught, bool]:
    """The same once the group is there: all ranks raise, and the group continues."""

    def refuse(handle: str, size_bytes: int | None = None) -> Segment:
        raise SharedMemoryError(errno.EACCES, "cannot open the shared memory of process 1: Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Segment, "attach", refuse)
        caught = attempt(lambda: lockstep.symmetric_empty(100))
    return caught, group_works()


def test_one_rank_cannot_open_more_memory() -> None:
    for caught, works in run_ranks(allocate_without_permission, 3):
        assert type(caught.error) is SharedMemoryError
        assert "cannot open the shared memory of process 1: Permission denied" in str(caught.error)
        assert works
