"""Ranks that die, leave or raise: every other rank that waits for them says so at once."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import lockstep
from failing import AT_ONCE_S, Caught, attempt, expect, is_dead, kill_self, pids_of_ranks, wait_until
from lockstep.errors import RankLost
from lockstep.testing import WorkerDied, limit_s, run_ranks

WORLD_SIZES = [2, 3, 5]
# Not the first and not the last where there are three; rank 0 in one case of its own.
VICTIM = 1


def wait_for_all() -> None:
    dist.barrier()  # the call that waits


def wait_for_large() -> None:
    dist.all_reduce(torch.ones(1_000_000))  # the call that waits


def line_in(function: Callable[..., object], comment: str) -> str:
    """`file.py:12` of the line that carries a comment."""
    code = function.__code__
    with open(code.co_filename) as file:
        lines = file.read().splitlines()[code.co_firstlineno - 1 :]
    offset = next(offset for offset, line in enumerate(lines) if line.endswith(comment))
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno + offset}"


def lose(how: str, victim: int) -> tuple[Caught, Caught]:
    """One rank goes while the others wait for it; then they call once more."""
    dist.all_reduce(torch.ones(2, 3))  # the victim's last
    if dist.get_rank() == victim:
        END[how]()
    call = wait_for_large if how == "killed, others in chunks" else wait_for_all
    return attempt(call), attempt(wait_for_large)


def end_as_a_program() -> None:
    """What the interpreter does at the end of a script."""
    atexit._run_exitfuncs()
    os._exit(0)


def end_by_exception() -> None:
    """What the interpreter does with an exception that nobody caught."""
    try:
        raise ValueError("no such file: weights.pt")  # the cause
    except ValueError:
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    os._exit(1)


def leave_and_wait() -> None:
    dist.destroy_process_group()
    raise SystemExit  # a worker of the tests ends its job by that, and lives on


END: dict[str, Callable[[], None]] = {
    "killed": kill_self,
    "killed, others in chunks": kill_self,
    "exited at once": lambda: os._exit(0),
    "left": leave_and_wait,
    "ended": end_as_a_program,
    "raised": end_by_exception,
}
STORY = {
    "killed": "died: its process is gone",
    "killed, others in chunks": "died: its process is gone",
    "exited at once": "died: its process is gone",
    "left": "left the group while others still needed it",
    "ended": "left the group while others still needed it",
    "raised": "failed: it raised ValueError: no such file: weights.pt at ",
}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("how", END)
def test_waiting_ranks_say_who_is_lost(how: str, world_size: int, capfd: pytest.CaptureFixture[str]) -> None:
    check_loss(how, world_size, VICTIM)


def test_rank_zero_is_lost() -> None:
    check_loss("killed", 3, 0)


def check_loss(how: str, world_size: int, victim: int) -> None:
    outcomes = run_ranks(lose, world_size, how, victim, expect_errors=True)
    waits = wait_for_large if how == "killed, others in chunks" else wait_for_all
    call = "all_reduce(float32[1000000], SUM)" if waits is wait_for_large else "barrier()"
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert isinstance(outcome, WorkerDied | SystemExit)
            continue
        first, second = outcome
        expect(
            first,
            RankLost,
            (victim,),
            STORY[how],
            f"rank {victim} (",
            f"rank {rank} (",
            f"pid {first.pid})",
            "all_reduce(float32[2, 3], SUM)",
            line_in(lose, "# the victim's last"),
            call,
            line_in(waits, "# the call that waits"),
        )
        if how == "raised":
            assert line_in(end_by_exception, "# the cause") in str(first.error)
        expect(second, RankLost, (victim,), "broke earlier on this rank", STORY[how])


def kill_self_after_a_step() -> None:
    """kill -9 from another thread, when the next collective of the caller has taken its first step, and waits."""
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    blocks = dist.group.WORLD.engine.team.blocks
    word = blocks.step_words[blocks.rank]
    before = blocks.words[word]

    def strike() -> None:
        wait_until(lambda: blocks.words[word] != before, "the step of this rank")
        time.sleep(0.02)  # until it waits
        kill_self()

    threading.Thread(target=strike, daemon=True).start()


def lose_one_inside(call: Callable[[], None]) -> tuple[Caught, Caught]:
    """Rank 1 is killed while it waits inside a collective, before anybody else has come."""
    pids = pids_of_ranks()
    if dist.get_rank() == 1:
        kill_self_after_a_step()
    else:
        wait_until(lambda: is_dead(pids[1]), "the death of rank 1")
    return attempt(call), attempt(wait_for_all)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rank_dies_inside_a_collective(world_size: int) -> None:
    outcomes = run_ranks(lose_one_inside, world_size, wait_for_large, expect_errors=True)
    for outcome in (*outcomes[:1], *outcomes[2:]):
        seen = "was last seen in collective #"
        expect(outcome[0], RankLost, (1,), "rank 1 (", "died", seen, "all_reduce(float32[1000000], SUM)")
        expect(outcome[1], RankLost, (1,))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_barrier_that_a_dead_rank_had_reached_is_complete(world_size: int) -> None:
    """All have come, so nobody raises; the next call does."""
    outcomes = run_ranks(lose_one_inside, world_size, wait_for_all, expect_errors=True)
    for outcome in (*outcomes[:1], *outcomes[2:]):
        assert outcome[0].error is None
        expect(outcome[1], RankLost, (1,), "rank 1 (", "died")


def lose_two() -> Caught | None:
    if dist.get_rank() in (0, 2):
        kill_self()
    return attempt(wait_for_all)


def test_two_ranks_are_lost() -> None:
    outcomes = run_ranks(lose_two, 5, expect_errors=True)
    for rank in (1, 3, 4):
        assert isinstance(outcomes[rank].error, RankLost)
        assert set(outcomes[rank].error.culprits) <= {0, 2}
        assert outcomes[rank].error.culprits
        assert outcomes[rank].seconds < limit_s(AT_ONCE_S)


def raise_in_a_world(victim: int) -> Caught:
    with lockstep.init(timeout=limit_s(30)) as world:
        dist.barrier()
        if world.rank == victim:
            raise ValueError("batch 7 is empty\nsecond line")  # the cause
        return attempt(wait_for_all)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rank_raises_in_its_world(world_size: int) -> None:
    outcomes = run_ranks(raise_in_a_world, world_size, VICTIM, init=False, expect_errors=True)
    for rank, outcome in enumerate(outcomes):
        if rank == VICTIM:
            assert isinstance(outcome, ValueError)
            continue
        cause = f"raised ValueError: batch 7 is empty at {__file__}"
        expect(outcome, RankLost, (VICTIM,), cause, line_in(raise_in_a_world, "# the cause"), "barrier()")


def interrupt_a_call() -> tuple[Caught, Caught]:
    """Ctrl-C strikes rank 1 inside a collective; its script continues as if nothing had happened."""
    dist.barrier()
    if dist.get_rank() == 1:
        import _thread

        threading.Timer(0.05, _thread.interrupt_main).start()
        try:
            dist.all_reduce(torch.ones(3))
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("it was not interrupted")
        return attempt(wait_for_all), attempt(wait_for_all)
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    wait_until(lambda: dist.group.WORLD.engine.team.blocks.state(1).name == "FAILED", "the interrupt")
    return attempt(wait_for_all), attempt(wait_for_all)


@pytest.mark.skipif(
    not hasattr(dist.AllreduceOptions(), "asyncOp"),
    reason="torch 2.6 does not say that the caller waits, so a thread runs the call, and Ctrl-C does not end it",
)
def test_interrupted_rank_is_out_of_step_for_good() -> None:
    kept, interrupted = run_ranks(interrupt_a_call, 2)
    expect(kept[0], RankLost, (1,), "raised KeyboardInterrupt", "all_reduce(float32[3], SUM)", "barrier()")
    assert "in the middle of collective" in str(interrupted[0].error)
    assert "raised KeyboardInterrupt" in str(interrupted[1].error)
