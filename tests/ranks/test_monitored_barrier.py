"""`dist.monitored_barrier`, which torch keeps for gloo: it takes our groups, and its errors name who did not come."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from failing import AT_ONCE_S, attempt, expect, group_works, wait_until
from lockstep.errors import CollectiveTimeout, RankLost
from lockstep.testing import run_ranks

LIMIT = timedelta(seconds=1)


def all_come() -> bool:
    for timeout in (None, timedelta(seconds=20), 20.0):
        for wait_all_ranks in (False, True):
            dist.monitored_barrier(timeout=timeout, wait_all_ranks=wait_all_ranks)
    pair = dist.new_group([0, 2])
    gloo = dist.new_group(backend="gloo")
    if dist.get_rank() != 1:
        dist.monitored_barrier(pair)
    else:
        with pytest.warns(UserWarning, match="monitored_barrier on global rank 1"):
            dist.monitored_barrier(pair)
    dist.monitored_barrier(gloo, timedelta(seconds=20))  # torch's own, as before
    return group_works()


def test_all_come() -> None:
    assert run_ranks(all_come, 3) == [True] * 3


def some_stay_away(absent: list[int], wait_all_ranks: bool, folder: str) -> object:
    """Those stay alive until the others have raised. Rank 0 comes last, and is the first to give up."""
    rank, present = dist.get_rank(), dist.get_world_size() - len(absent)
    if rank in absent:
        wait_until(lambda: len(list(Path(folder).glob("* has raised"))) == present, "the others' errors", deadline_s=20)
        return None
    if rank == 0:
        wait_until(lambda: len(list(Path(folder).glob("* comes"))) == present - 1, "the others to come", deadline_s=20)
    (Path(folder) / f"{rank} comes").touch()
    limit = LIMIT if rank == 0 else 20 * LIMIT
    caught = attempt(lambda: dist.monitored_barrier(timeout=limit, wait_all_ranks=wait_all_ranks))
    (Path(folder) / f"{rank} has raised").touch()
    return caught


@pytest.mark.parametrize(
    ("absent", "wait_all_ranks", "words"),
    [
        ([1], False, "Rank 1 failed to pass monitoredBarrier in 1000 ms"),
        ([1, 2], False, "Rank 1 failed to pass monitoredBarrier in 1000 ms"),
        ([1, 2], True, "Ranks 1, 2 failed to pass monitoredBarrier in 1000 ms"),
    ],
)
def test_some_stay_away(absent: list[int], wait_all_ranks: bool, words: str, tmp_path: Path) -> None:
    outcomes = run_ranks(some_stay_away, 3, absent, wait_all_ranks, str(tmp_path), expect_errors=True)
    culprits = [f"rank {rank} (" for rank in absent]
    within_s = LIMIT.total_seconds() + AT_ONCE_S
    expect(outcomes[0], CollectiveTimeout, absent, words, *culprits, "test_monitored_barrier.py", within_s=within_s)
    if 2 not in absent:
        reached = "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
        expect(outcomes[2], CollectiveTimeout, absent, reached + "rank 0: ", *culprits, within_s=within_s)


def one_has_left() -> tuple[object, object]:
    """In a group whose rank numbers are not the global ones."""
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    if rank == 2:
        dist.destroy_process_group(pair)
    if rank != 1:
        return None, None
    return attempt(lambda: dist.monitored_barrier(pair)), attempt(lambda: dist.monitored_barrier(pair))


def test_one_has_left() -> None:
    outcomes = run_ranks(one_has_left, 3)
    first, second = outcomes[1]
    expect(first, RankLost, [2], "Rank 2 failed to pass monitoredBarrier: rank 2 (", "left the group")
    expect(second, RankLost, [2], "group 1 of ranks [1, 2] broke earlier on this rank: rank 2 (", "left the group")
