"""Ranks that do not come, or come too late: an error at the deadline on those that wait, and on the late one too."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lockstep
from failing import (
    AT_ONCE_S,
    Caught,
    attempt,
    expect,
    group_works,
    pids_of_ranks,
    process_state,
    set_deadline,
    wait_until,
)
from lockstep.errors import CollectiveTimeout, RendezvousError
from lockstep.testing import limit_s, run_ranks

WORLD_SIZES = [2, 3, 5]
LATE = 1


def deadline_of_test_s() -> float:
    """What a test gives its ranks: a rank that is not the late one comes in time, beside other tests too."""
    return round(limit_s(2.0), 1)


def expect_timeout(caught: Caught, deadline_s: float, *texts: str) -> None:
    """Assert that a call failed at the deadline, its own or a peer's a moment earlier, and blames the late rank."""
    assert type(caught.error) is CollectiveTimeout, caught
    assert caught.error.culprits == (LATE,)
    for text in texts:
        assert text in str(caught.error), f"{text!r} is not in {caught.error}"
    assert deadline_s / 2 < caught.seconds < deadline_s + limit_s(AT_ONCE_S)


def all_reduce(numel: int) -> None:
    dist.all_reduce(torch.ones(numel))


def come_late(folder: str, numel: int, deadline_s: float) -> tuple[Caught, Caught]:
    """The late rank comes when all others have given up."""
    set_deadline(deadline_s)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == LATE:
        wait_until(lambda: len(list(Path(folder).iterdir())) == world_size - 1, "giving up", 10 + deadline_s)
    first = attempt(lambda: all_reduce(numel))
    Path(folder, str(rank)).touch()
    return first, attempt(lambda: all_reduce(numel))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("numel", [4, 1_000_000])
def test_late_rank_fails_too(world_size: int, numel: int, tmp_path: Path) -> None:
    deadline_s = deadline_of_test_s()
    outcomes = run_ranks(come_late, world_size, str(tmp_path), numel, deadline_s)
    call, here = f"all_reduce(float32[{numel}], SUM)", f"{Path(__file__).name}:{all_reduce.__code__.co_firstlineno + 1}"
    waiting = [outcome for rank, outcome in enumerate(outcomes) if rank != LATE]
    for first, _ in waiting:
        last = "was last seen in collective #1, barrier() at "
        late_pid = f"pid {outcomes[LATE][0].pid})"
        expect_timeout(first, deadline_s, call, here, last, f"rank {LATE} (", late_pid, "in set_deadline")
    late = outcomes[LATE][0]
    expect(
        late,
        CollectiveTimeout,
        (LATE,),
        f"rank {LATE} (",
        "came to collective #2",
        call,
        here,
        "had given up",
        "waited ",  # the deadline, more where the machine is busy
    )
    for first, second in outcomes:
        expect(second, CollectiveTimeout, (LATE,), "broke earlier on this rank", str(first.error))


def meet_without_late(folder: str, what: str) -> None:
    """Wait until all ranks but rank 1 are here, which a group of which rank 1 is stopped cannot tell."""
    rank, others = dist.get_rank(), {*range(dist.get_world_size())} - {LATE}
    Path(folder, f"{rank} {what}").touch()
    wait_until(lambda: all(Path(folder, f"{one} {what}").exists() for one in others), what)


def continue_when_all_gave_up(folder: str, pid: int) -> None:
    """Called by all but rank 1 behind their error. Continued earlier, it would meet ranks that still wait for it."""
    try:
        meet_without_late(folder, "giving up")
    finally:
        if dist.get_rank() == 0:
            os.kill(pid, signal.SIGCONT)


def stop_between_calls(deadline_s: float, folder: str) -> Caught:
    """Rank 1 is stopped before a collective, and continues when the others have given up."""
    pids = pids_of_ranks()
    set_deadline(deadline_s)
    if dist.get_rank() == LATE:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        wait_until(lambda: process_state(pids[LATE]) in "Tt", "the stop")
        meet_without_late(folder, "the call")  # one that came much later than another would be blamed, too
    caught = attempt(lambda: all_reduce(4))
    if dist.get_rank() != LATE:
        continue_when_all_gave_up(folder, pids[LATE])
    return caught


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rank_is_stopped_between_calls(world_size: int, tmp_path: Path) -> None:
    deadline_s = deadline_of_test_s()
    outcomes = run_ranks(stop_between_calls, world_size, deadline_s, str(tmp_path))
    for rank, outcome in enumerate(outcomes):
        if rank != LATE:
            late = f"rank {LATE} (", f"pid {outcomes[LATE].pid})"
            expect_timeout(outcome, deadline_s, "all_reduce(float32[4], SUM)", *late)
    assert type(outcomes[LATE].error) is CollectiveTimeout
    assert outcomes[LATE].error.culprits == (LATE,)


def stop_within_calls(delay_s: float, deadline_s: float, folder: str) -> Caught:
    """Rank 1 is stopped by rank 0 somewhere in a run of collectives of many steps."""
    pids = pids_of_ranks()
    set_deadline(deadline_s)
    if dist.get_rank() == 0:
        threading.Timer(delay_s, os.kill, (pids[LATE], signal.SIGSTOP)).start()
    caught = attempt(lambda: [all_reduce(2_000_000) for _ in range(10_000)])
    if dist.get_rank() != LATE:
        continue_when_all_gave_up(folder, pids[LATE])
    return caught


@pytest.mark.parametrize("delay_s", [0.02, 0.0307, 0.0411])
def test_rank_is_stopped_within_a_call(delay_s: float, tmp_path: Path) -> None:
    for outcome in run_ranks(stop_within_calls, 3, delay_s, deadline_of_test_s(), str(tmp_path)):
        assert type(outcome.error) is CollectiveTimeout, outcome
        assert outcome.error.culprits == (LATE,)


def come_late_to_one_of_two_groups(deadline_s: float, folder: str) -> tuple[Caught | None, Caught, bool]:
    """A deadline of one group says nothing about another."""
    short = dist.new_group()
    short.set_timeout(timedelta(seconds=deadline_s))
    gave_up, waited = Path(folder, "gave up"), None
    if dist.get_rank() == LATE:
        wait_until(gave_up.exists, "giving up", 10 + deadline_s)  # in another group: a deadlock, which is told sooner
    else:
        waited = attempt(lambda: dist.barrier(short))
        gave_up.touch()
    works = group_works()
    return waited, attempt(lambda: dist.barrier(short)), works


def test_groups_have_their_own_deadlines(tmp_path: Path) -> None:
    deadline_s = deadline_of_test_s()
    outcomes = run_ranks(come_late_to_one_of_two_groups, 2, deadline_s, str(tmp_path))
    (waited, again, works), (_, late, works_too) = outcomes
    expect_timeout(waited, deadline_s, "barrier()", "of ranks [0, 1]", "had not entered a collective yet")
    expect(again, CollectiveTimeout, (LATE,), "broke earlier")
    expect(late, CollectiveTimeout, (LATE,), "had given up")
    assert works
    assert works_too


def wait_with_a_limit(folder: str) -> tuple[Caught, bool]:
    """A limit on one wait breaks nothing: the call continues."""
    tensor = torch.ones(5)
    came = Path(folder, "came")
    if dist.get_rank() == LATE:
        wait_until(came.exists, "giving up")
    work = dist.all_reduce(tensor, async_op=True)
    caught = attempt(lambda: work.wait(timedelta(seconds=0.05)))
    came.touch()
    work.wait()
    return caught, tensor.tolist() == [2.0] * 5 and group_works()


def test_limit_on_one_wait(tmp_path: Path) -> None:
    outcomes = run_ranks(wait_with_a_limit, 2, str(tmp_path))
    error = outcomes[0][0].error
    assert type(error) is CollectiveTimeout
    assert "all_reduce(float32[5], SUM) had not finished when wait(timeout=0.05 s) ran out" in str(error)
    assert [works for _, works in outcomes] == [True, True]


def meet_on_disk() -> int:
    """Wait until every rank has got here, whatever it had to import; its rank."""
    rank, folder = int(os.environ["RANK"]), Path(os.environ["LOCKSTEP_RENDEZVOUS"])
    Path(folder, f"here-{rank}").touch()
    wait_until(lambda: len(list(folder.glob("here-*"))) == int(os.environ["WORLD_SIZE"]), "meeting")
    return rank


def never_come(deadline_s: float) -> Caught:
    if meet_on_disk() == LATE:
        return Caught(None, 0.0, 0)
    return attempt(lambda: lockstep.init(timeout=deadline_s))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rank_never_comes_to_init(world_size: int) -> None:
    deadline_s = deadline_of_test_s()
    outcomes = run_ranks(never_come, world_size, deadline_s, init=False)
    for rank, outcome in enumerate(outcomes):
        if rank != LATE:
            assert type(outcome.error) is RendezvousError
            assert f"rank {LATE} did not come within {deadline_s:g} s of rank {rank}" in str(outcome.error)
            assert outcome.seconds < deadline_s + limit_s(AT_ONCE_S)


def wait_for_rank_zero(deadline_s: float) -> Caught:
    if meet_on_disk() == 0:
        return Caught(None, 0.0, 0)
    return attempt(lambda: lockstep.init(timeout=deadline_s))


def test_rank_zero_never_comes_to_init() -> None:
    deadline_s = deadline_of_test_s()
    _, waited = run_ranks(wait_for_rank_zero, 2, deadline_s, init=False)
    assert type(waited.error) is RendezvousError
    assert f"rank 0 did not come within {deadline_s:g} s of rank 1. Is every rank running" in str(waited.error)
    assert waited.seconds < deadline_s + limit_s(AT_ONCE_S)
