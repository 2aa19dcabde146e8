"""Errors of asynchronous calls, of sub-groups, and out of the backward pass of a model."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from failing import Caught, attempt, expect, group_works, is_dead, kill_self, pids_of_ranks, ranks_named, wait_until
from lockstep.comm.work import PendingWork
from lockstep.errors import CollectiveAborted, CollectiveMismatch, CollectiveTimeout, RankLost
from lockstep.testing import WorkerDied, limit_s, run_ranks

HERE = Path(__file__).name


def reduce_later(numel: int) -> dist.Work:
    work = dist.all_reduce(torch.ones(numel), async_op=True)
    assert work is not None
    return work


def line_of_call() -> str:
    return f"{HERE}:{reduce_later.__code__.co_firstlineno + 1} in reduce_later"


def wait_for_mismatch() -> tuple[Caught, Caught, dict[str, Any]]:
    """Three calls are under way when the second does not match."""
    odd = dist.get_rank() == 1
    works = [reduce_later(4), reduce_later(6 if odd else 5), reduce_later(7)]
    waited = attempt(works[1].wait)
    future = works[1].get_future()
    facts = {
        "future text": str(attempt(future.wait).error),
        "completed": works[1].is_completed(),
        "success": works[1].is_success(),
        "exception": works[1].exception(),
        "neighbours": [works[0].wait(), works[2].wait()],
        "works": group_works(),
    }
    return waited, attempt(works[1].wait), facts


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_asynchronous_mismatch(world_size: int) -> None:
    outcomes = run_ranks(wait_for_mismatch, world_size)
    culprits = () if world_size == 2 else (1,)
    pids = {rank: outcome[0].pid for rank, outcome in enumerate(outcomes)}
    for waited, again, facts in outcomes:
        texts = "all_reduce(float32[5], SUM)", "all_reduce(float32[6], SUM)", line_of_call()
        expect(waited, CollectiveMismatch, culprits, *texts)
        expect(again, CollectiveMismatch, culprits, *texts)
        assert ranks_named(waited.error) == pids
        for text in texts:
            assert text in facts["future text"]
        assert (facts["completed"], facts["success"]) == (True, False)
        assert str(facts["exception"]) == str(waited.error)
        assert facts["neighbours"] == [True, True], "a mismatch takes its neighbours along"
        assert facts["works"]


def attach_to_mismatch() -> tuple[str, str]:
    """The future of a failing call, taken before and after it has failed, and one derived from it."""
    numel = dist.get_rank() + 1
    early = reduce_later(numel).get_future().then(lambda future: future.value())
    late_work = reduce_later(numel)
    attempt(late_work.wait)
    late = late_work.get_future()
    texts = str(attempt(early.wait).error), str(attempt(late.wait).error)
    assert group_works()
    return texts


def test_future_fails_whenever_it_is_taken() -> None:
    for texts in run_ranks(attach_to_mismatch, 2):
        for text in texts:
            assert "called different operations" in text
            assert line_of_call() in text


def wait_for_the_dead() -> list[Caught]:
    if dist.get_rank() == 1:
        kill_self()
    works = [reduce_later(4), reduce_later(100_000)]
    return [attempt(works[0].wait), attempt(works[1].wait), attempt(lambda: reduce_later(1).wait())]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_asynchronous_loss(world_size: int) -> None:
    outcomes = run_ranks(wait_for_the_dead, world_size, expect_errors=True)
    for outcome in (*outcomes[:1], *outcomes[2:]):
        expect(outcome[0], RankLost, (1,), "rank 1 (", "died", "all_reduce(float32[4], SUM)", line_of_call())
        for later in outcome[1:]:
            expect(later, RankLost, (1,), "broke earlier on this rank", "died")


def abort_under_a_call() -> Caught:
    """Rank 1 never comes; rank 0 gives up on its own group."""
    group = dist.new_group()
    if dist.get_rank() == 1:
        return attempt(lambda: None)
    works = [dist.all_reduce(torch.ones(3), group=group, async_op=True), dist.barrier(group, async_op=True)]
    group.abort()
    running, queued = (attempt(work.wait) for work in works)
    expect(queued, CollectiveAborted, (), "barrier()", "shut down before this call started")
    return running


def test_abort_under_a_call() -> None:
    running, _ = run_ranks(abort_under_a_call, 2)
    # The thread may not have begun with it; then it was only queued.
    expect(running, CollectiveAborted, (), "all_reduce(float32[3], SUM)", "shut down")


def destroy_ahead(folder: str) -> list[float]:
    """Rank 1 destroys the group right after its calls, for which rank 0 comes late."""
    group = dist.new_group()
    called = Path(folder, "called")
    tensors = [torch.full((size,), dist.get_rank() + 1.0) for size in (3, 100_000, 3)]
    if dist.get_rank() == 0:
        wait_until(called.exists, "the calls of rank 1")
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    if dist.get_rank() == 0:
        assert all(work.wait() for work in works)
    called.touch()
    dist.destroy_process_group(group)
    assert all(work.is_success() for work in works)
    return [tensor[-1].item() for tensor in tensors]


def test_destroying_a_group_lets_its_calls_end(tmp_path: Path) -> None:
    assert run_ranks(destroy_ahead, 2, str(tmp_path)) == [[3.0] * 3] * 2


def destroy_with_a_call_too_many() -> Caught:
    """Rank 0 has called what rank 1 will never call: it learns that when rank 1 leaves, too."""
    group = dist.new_group()
    dist.barrier(group)
    work = dist.barrier(group, async_op=True) if dist.get_rank() == 0 else None
    dist.destroy_process_group(group)
    return attempt(lambda: work and work.wait())


def test_destroying_a_group_with_a_call_too_many() -> None:
    caught, _ = run_ranks(destroy_with_a_call_too_many, 2)
    expect(caught, RankLost, (1,), "rank 1 (", "left the group", "barrier()")


@pytest.mark.parametrize("how", ["exception", "failure"])
def test_destroying_a_group_after_an_error_waits_for_nobody(how: str) -> None:
    running, _ = run_ranks(destroy_after_an_error, 2, how)
    expect(running, CollectiveAborted, (), "all_reduce(float32[3], SUM)", "shut down")


def destroy_after_an_error(how: str) -> Caught:
    group = dist.new_group()
    if dist.get_rank() == 1:
        return attempt(lambda: None)
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    if how == "failure":
        group.fail("raised ValueError")
        dist.destroy_process_group(group)
    else:
        with contextlib.suppress(ValueError):
            try:
                raise ValueError
            finally:
                dist.destroy_process_group(group)
    return attempt(work.wait)


def call_from_callbacks() -> list[float]:
    """A callback of a call makes calls of its own, with and without waiting; as communication hooks do.

    Each is added before the next call: else a rank whose first call is over by then would make these after the second.
    """
    rank = float(dist.get_rank() + 1)

    def more(future: torch.futures.Future[list[torch.Tensor]]) -> list[torch.Tensor]:
        (tensor,) = future.value()
        dist.all_reduce(tensor)
        later = dist.all_reduce(tensor, async_op=True)
        assert later is not None
        return later.get_future().wait()

    first, second = torch.tensor([rank]), torch.tensor([rank])
    futures = []
    for tensor in (first, second):
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        futures.append(work.get_future().then(more))
    return [future.wait()[0].item() for future in futures]


def test_callbacks_may_call() -> None:
    assert run_ranks(call_from_callbacks, 2) == [[12.0, 12.0]] * 2


def behind_a_gate(count: int) -> tuple[threading.Event, list[torch.Tensor], list[dist.Work]]:
    """Sums that begin when the gate opens, so that callbacks added before run in the thread of the group."""
    gate = threading.Event()
    engine: Any = dist.group.WORLD.engine  # type: ignore[union-attr]
    engine._runner.submit(PendingWork(lambda: expect_set(gate), [], lambda: "the gate"))
    tensors = [torch.tensor([dist.get_rank() + 1.0]) for _ in range(count)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    return gate, tensors, [work for work in works if work is not None]


def expect_set(gate: threading.Event) -> None:
    assert gate.wait(limit_s(20))


def wait_in_a_callback_for_the_next_but_one(way: str) -> list[float]:
    """The callback runs in the thread that has yet to run the calls which it waits for."""
    gate, tensors, works = behind_a_gate(4)

    def wait_for_another(_: object) -> float:
        if way == "future":
            works[2].get_future().wait()
        else:
            assert works[2].wait(timedelta(seconds=limit_s(20)))
        dist.all_reduce(tensors[1])
        return tensors[2].item()

    future = works[0].get_future().then(wait_for_another)
    gate.set()
    return [future.wait(), *(tensor.item() for work, tensor in zip(works, tensors, strict=True) if work.wait())]


@pytest.mark.parametrize("way", ["handle", "future"])
def test_callbacks_may_wait_for_calls_behind_their_own(way: str) -> None:
    assert run_ranks(wait_in_a_callback_for_the_next_but_one, 2, way) == [[3.0, 3.0, 6.0, 3.0, 3.0]] * 2


def wait_in_a_callback_for_an_older_future() -> tuple[str, list[Caught]]:
    """Nothing tells the group's thread that it waits for what it has yet to run."""
    gate, _, works = behind_a_gate(3)
    last = works[2].get_future()
    future = works[0].get_future().then(lambda _: last.wait())
    dist.group.WORLD.set_timeout(timedelta(seconds=0.3))  # type: ignore[union-attr]
    gate.set()
    found = attempt(future.wait)
    return str(found.error), [attempt(works[1].wait), attempt(works[2].wait), attempt(dist.barrier)]


def test_a_callback_that_waits_for_an_older_future_has_a_deadline() -> None:
    for rank, (of_future, caught) in enumerate(run_ranks(wait_in_a_callback_for_an_older_future, 2)):
        text = "for 0.3 s a callback of an earlier call has occupied the thread that should run it"
        assert text in of_future
        for one in caught:
            expect(one, CollectiveTimeout, (rank,), "all_reduce(float32[1], SUM) of the default group", text)


# ---- sub-groups ------------------------------------------------------------------------------------


def disagree_in_a_group(members: list[int]) -> tuple[Caught | None, bool]:
    group = dist.new_group(members)
    caught = None
    if dist.get_rank() in members:
        odd = dist.get_rank() == members[-1]
        caught = attempt(lambda: dist.broadcast(torch.ones(2), members[1 if odd else 0], group))
        dist.barrier(group)
    return caught, group_works()


@pytest.mark.parametrize("members", [[2, 1], [4, 1, 3], [0, 2, 3, 4]])
def test_mismatch_in_a_group_names_global_ranks(members: list[int]) -> None:
    outcomes = run_ranks(disagree_in_a_group, 5, members)
    ordered = sorted(members)
    culprits = () if len(members) == 2 else (members[-1],)
    for rank, (caught, works) in enumerate(outcomes):
        assert works
        if rank not in members:
            continue
        roots = [f"broadcast(float32[2], root={members[0]})", f"broadcast(float32[2], root={members[1]})"]
        expect(caught, CollectiveMismatch, culprits, f"of ranks {ordered}", *roots, HERE)
        assert ranks_named(caught.error) == {member: outcomes[member][0].pid for member in members}


def die_in_a_group(members: list[int], victim: int) -> tuple[Caught, Caught] | None:
    group = dist.new_group(members)
    pids = pids_of_ranks()
    if dist.get_rank() == victim:
        kill_self()
    if dist.get_rank() not in members:
        wait_until(lambda: is_dead(pids[victim]), "the death")
        return attempt(lambda: dist.barrier()), attempt(lambda: dist.barrier())
    return attempt(lambda: dist.barrier(group)), attempt(lambda: dist.barrier())


def test_loss_in_a_group_names_global_ranks() -> None:
    outcomes = run_ranks(die_in_a_group, 5, [1, 3, 4], 3, expect_errors=True)
    assert isinstance(outcomes.pop(3), WorkerDied)
    for rank, (in_group, in_world) in zip((0, 1, 2, 4), outcomes, strict=True):
        group = "of ranks [1, 3, 4]" if rank in (1, 4) else "the default group"
        expect(in_group, RankLost, (3,), "rank 3 (", "died", group, f"rank {rank} (")
        # Losing a rank in one group is a loss in every other, and each says so by itself.
        assert type(in_world.error) is RankLost
        assert in_world.error.culprits == (3,)


# ---- models ----------------------------------------------------------------------------------------


def torch_ddp(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model)


def our_ddp(model: torch.nn.Module) -> torch.nn.Module:
    return lockstep.DistributedDataParallel(model)


def step_against_barrier(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> tuple[Caught, bool]:
    model = wrap(torch.nn.Linear(3, 1))
    loss = model(torch.ones(2, 3)).sum()
    if dist.get_rank() == dist.get_world_size() - 1:
        return attempt(lambda: dist.barrier()), group_works()
    return attempt(lambda: loss.backward()), group_works()


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("wrap", [torch_ddp, our_ddp])
def test_step_of_a_model_against_a_barrier(wrap: Callable[..., torch.nn.Module], world_size: int) -> None:
    outcomes = run_ranks(step_against_barrier, world_size, wrap)
    culprits = () if world_size == 2 else (world_size - 1,)
    for rank, (caught, works) in enumerate(outcomes):
        texts = ("called different operations", "barrier()", f"rank {rank} (")
        assert len(set(re.findall(rf"{HERE}:\d+ in ", str(caught.error)))) == 2, "the lines of both calls"
        if wrap is torch_ddp and rank < world_size - 1:
            # It comes through C++, which keeps the text and not the type.
            assert isinstance(caught.error, RuntimeError)
            for text in (*texts, "all_reduce(float32[4], SUM)"):
                assert text in str(caught.error)
            assert caught.seconds < limit_s(1)
        else:
            expect(caught, CollectiveMismatch, culprits, *texts)
        assert works


def lose_a_rank_in_training(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Caught:
    model = wrap(torch.nn.Sequential(torch.nn.Linear(3, 300), torch.nn.Linear(300, 1)))
    model(torch.ones(2, 3)).sum().backward()
    loss = model(torch.ones(2, 3)).sum()
    if dist.get_rank() == 1:
        kill_self()
    return attempt(lambda: loss.backward())


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("wrap", [torch_ddp, our_ddp])
def test_rank_dies_in_a_step(wrap: Callable[..., torch.nn.Module], world_size: int) -> None:
    outcomes = run_ranks(lose_a_rank_in_training, world_size, wrap, expect_errors=True)
    for caught in (*outcomes[:1], *outcomes[2:]):
        assert isinstance(caught.error, RuntimeError)
        for text in ("rank 1 (", "died: its process is gone", "was last seen in collective #", HERE):
            assert text in str(caught.error)
        assert caught.seconds < limit_s(1)
        if wrap is our_ddp:
            assert type(caught.error) is RankLost
