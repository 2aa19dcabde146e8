"""`lockstep.rank_zero_first`: one rank goes first, the others come when it is done, however long it takes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import lockstep
from lockstep.errors import CollectiveTimeout, DataError, LockstepError
from lockstep.testing import run_ranks


def first_one(folder: str, local: bool) -> list[str]:
    """What is there when this rank's block begins."""
    world = lockstep.init()
    with lockstep.rank_zero_first(local=local):
        there = sorted(path.name for path in Path(folder).iterdir())
        (Path(folder) / f"rank{world.rank}").touch()
    return there


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("local", [False, True])
def test_rank_zero_goes_first(world_size: int, local: bool, tmp_path: Path) -> None:
    found = run_ranks(first_one, world_size, str(tmp_path), local)
    assert found[0] == []
    assert all("rank0" in there for there in found[1:])


def test_alone_it_runs_the_block() -> None:
    with lockstep.rank_zero_first():
        done = True
    assert done


def slow_first(takes_s: float, group_timeout_s: float, timeout_s: float) -> str:
    with lockstep.init(timeout=group_timeout_s, device="cpu") as world:
        try:
            with lockstep.rank_zero_first(timeout=timeout_s):
                if world.rank == 0:
                    deadline = time.monotonic() + takes_s
                    while time.monotonic() < deadline:
                        time.sleep(0.01)
        except CollectiveTimeout as error:
            return type(error).__name__
        return "done"


def test_it_may_take_longer_than_the_group_waits() -> None:
    assert run_ranks(slow_first, 2, 1.0, 0.4, 60.0, init=False) == ["done", "done"]


def failing_first(own: bool) -> str:
    lockstep.init()
    try:
        with lockstep.rank_zero_first():
            raise DataError("no such set") if own else OSError("disk full")
    except (LockstepError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_failure_of_the_first_is_one_on_all() -> None:
    assert run_ranks(failing_first, 2, True) == ["DataError: no such set"] * 2
    assert run_ranks(failing_first, 2, False) == [
        "OSError: disk full",
        "LockstepError: rank 0 failed: OSError: disk full",
    ]
