"""Elastic training: back to the last commit in memory, or, when a process died, on disk."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep.compat.horovod.torch as hvd
from launching import Launches
from lockstep.compat.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from lockstep.testing import run_ranks


class Failures:
    """Raises something once at each of some steps."""

    def __init__(self, at: dict[int, Any]) -> None:
        self.at = at

    def maybe(self, step: int) -> None:
        failure = self.at.pop(step, None)
        if failure is not None:
            failure()


def train(failures: Failures, steps: int = 8) -> tuple[list[int], float, list[int]]:
    """Count steps, committing every second one; each adds the ranks' mean of 1 to a weight."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    seen: list[int] = []
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.step)])

    @hvd.elastic.run
    def loop(state: Any) -> list[int]:
        while state.step < steps:
            seen.append(state.step)
            failures.maybe(state.step)
            optimizer.zero_grad()
            (-state.model.weight.sum()).backward()
            optimizer.step()
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
        return seen

    assert loop(state) is seen
    assert state.step == steps
    return seen, model.weight.item(), resets


def survive() -> Any:
    hvd.init()
    rank = hvd.rank()

    def fail_here() -> None:
        if rank == 1:
            raise HorovodInternalError("made up")

    result = train(Failures({3: fail_here, 6: fail_here}))
    hvd.shutdown()
    return result


def test_one_rank_fails_and_all_go_back_to_the_last_commit() -> None:
    for seen, weight, resets in run_ranks(survive, 2, init=False):
        # The commit at 2 is gone back to from 3; that at 6 is what 6 begins with.
        assert seen in ([0, 1, 2, 3, 2, 3, 4, 5, 6, 6, 7], [0, 1, 2, 3, 2, 3, 4, 5, 6, 6, 7])
        assert weight == 8.0
        assert resets == [2, 6]


def interrupted() -> Any:
    hvd.init()
    state = hvd.elastic.TorchState(nn.Linear(1, 1), None, step=0)
    calls: list[tuple[int, bool]] = []

    @hvd.elastic.run
    def loop(state: Any) -> int:
        calls.append((state.step, True))
        while state.step < 4:
            state.step += 1
            # Only the last rank hears of it, and only once.
            if state.step == 3 and hvd.rank() == hvd.size() - 1 and len(calls) == 1:
                state.on_hosts_updated(100.0, 1)
            state.check_host_updates()
        return len(calls)

    assert loop(state) == 2
    hvd.shutdown()
    return calls


def test_hosts_updated_on_one_rank_interrupts_all_without_going_back() -> None:
    for calls in run_ranks(interrupted, 2, init=False):
        assert calls == [(0, True), (3, True)]


def kept_state() -> None:
    hvd.init()
    rank = hvd.rank()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=rank, note="r" * rank)
    state.sync()
    assert (state.epoch, state.note) == (0, "")
    weights = hvd.allgather(model.weight.detach().clone())
    assert torch.equal(weights[0], weights[-1])
    state.save()
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state.epoch = 5
    state.restore()
    assert state.epoch == 0
    assert torch.equal(model.weight, before)
    other = nn.Linear(2, 1)
    state.model = other  # kept from now on, in place of the first
    assert state.model is other
    hvd.shutdown()


def test_state_saves_restores_and_synchronizes() -> None:
    run_ranks(kept_state, 2, init=False)


def restarted(folder: Path) -> None:
    """Two attempts of a job, one after the other: a state of the second one resumes what the first has committed."""
    hvd.init()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LOCKSTEP_ELASTIC_FOLDER", str(folder))
        for attempt, resumes_at in enumerate((0, 3, 4)):
            environment.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
            state = hvd.elastic.TorchState(nn.Linear(1, 1), None, step=0)
            state.resume()
            assert state.step == resumes_at
            for _ in range(1 if attempt else 3):
                state.step += 1
                state.commit()
    hvd.shutdown()


def test_commits_after_a_restart_follow_those_before(tmp_path: Path) -> None:
    """One file is left, however often a job starts again."""
    run_ranks(restarted, 2, tmp_path, init=False)
    assert [path.name[:13] for path in tmp_path.iterdir()] == ["step-00000005"]


def sampled() -> Any:
    hvd.init()
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=True, seed=3)
    first = list(sampler)
    sampler.record_batch(0, 2)
    state = sampler.state_dict()
    sampler.reset()
    rest = list(sampler)
    assert len(sampler) == len(rest)
    again = hvd.elastic.ElasticSampler(range(10), seed=3)
    again.load_state_dict(state)
    assert list(again) == rest
    sampler.set_epoch(1)
    shares = hvd.allgather_object((first, rest, list(sampler)))
    assert sorted(set().union(*(share[2] for share in shares))) == list(range(10))
    hvd.shutdown()
    return shares


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_elastic_sampler_shares_out_what_is_left(world_size: int) -> None:
    shares = run_ranks(sampled, world_size, init=False)[0]
    assert sorted(set().union(*(first for first, _, _ in shares))) == list(range(10))
    # After one batch of two on each rank, the rest are the others.
    done = {index for first, _, _ in shares for index in first[:2]}
    left = set().union(*(rest for _, rest, _ in shares))
    assert left == set(range(10)) - done
    assert len({len(rest) for _, rest, _ in shares}) == 1


def test_interrupt_survives_pickling() -> None:
    import pickle

    assert pickle.loads(pickle.dumps(HostsUpdatedInterrupt(True))).skip_sync is True


@pytest.mark.usefixtures("forked")
def test_a_killed_rank_costs_what_came_after_the_last_commit(launches: Launches) -> None:
    """All ranks start again, and continue from the commit on disk; the folder is gone afterwards."""
    script = launches.script(
        textwrap.dedent(
            """
            import os, signal, torch
            import lockstep.compat.horovod.torch as hvd

            hvd.init()
            model = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.zeros_(model.weight)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
            state = hvd.elastic.TorchState(model, optimizer, step=0)

            @hvd.elastic.run
            def train(state):
                print(f"rank {hvd.rank()} begins at {state.step}", flush=True)
                while state.step < 4:
                    optimizer.zero_grad()
                    (-state.model.weight.sum()).backward()
                    optimizer.step()
                    state.step += 1
                    if state.step == 2:
                        state.commit()
                    if state.step == 3 and hvd.rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                        os.kill(os.getpid(), signal.SIGKILL)
                print(f"rank {hvd.rank()} ends with {state.model.weight.item()}", flush=True)

            train(state)
            """
        )
    )
    options = ("-np", "2", "--min-np", "2", "--reset-limit", "2")
    done = launches.run(*options, sys.executable, script, command="horovodrun")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} begins at 0" in done.stdout
        assert f"rank {rank} begins at 2" in done.stdout
        assert f"rank {rank} ends with 4.0" in done.stdout
    assert not list(launches.temporary.glob("horovodrun-elastic-*"))
