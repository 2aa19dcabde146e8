"""Where a backward pass can go from where it is, and where an engine's really goes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import DistributedDataParallel
from lockstep.errors import ModelError, UnusedParameters
from lockstep.parallel import backward_pass
from lockstep.parallel.backward_pass import PassState, Phase
from thread_team import run_threads

IDLE, READY, ARMED, DEFERRED, AVERAGING, WAITING = Phase

MOVES: dict[str, Callable[[PassState], None]] = {
    "ready": PassState.ready,
    "accumulate": PassState.accumulate,
    "begin early": lambda backward: backward.begin(2, early=True),
    "begin": lambda backward: backward.begin(2, early=False),
    "wait": lambda backward: backward.wait([0]),
    "average": PassState.average,
    "finish": PassState.finish,
    "abandon": PassState.abandon,
}

# In each phase, where a move leads; moves that are not here are refused.
DRAWN: dict[Phase, dict[str, Phase]] = {
    IDLE: {"ready": READY, "accumulate": IDLE, "begin early": ARMED, "begin": DEFERRED, "wait": WAITING},
    READY: {"ready": READY, "accumulate": IDLE, "begin early": ARMED, "begin": DEFERRED, "wait": WAITING},
    ARMED: {"wait": WAITING, "abandon": IDLE},
    DEFERRED: {"wait": WAITING, "abandon": IDLE},
    AVERAGING: {"finish": IDLE, "abandon": IDLE},
    WAITING: {"accumulate": WAITING, "begin early": ARMED, "begin": DEFERRED, "wait": WAITING, "abandon": IDLE},
}
PATHS: dict[Phase, tuple[str, ...]] = {
    IDLE: (),
    READY: ("ready",),
    ARMED: ("ready", "begin early"),
    DEFERRED: ("ready", "begin"),
    AVERAGING: ("ready", "begin", "average"),
    WAITING: ("ready", "begin", "wait"),
}


def arrive(phase: Phase) -> PassState:
    """One that has come to a phase as an engine's does."""
    backward = PassState()
    for name in PATHS[phase]:
        MOVES[name](backward)
    assert backward.phase is phase
    backward.begun_task = -1  # so that task 2 can begin again
    return backward


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("phase", Phase)
def test_moves(phase: Phase, name: str) -> None:
    backward = arrive(phase)
    leads_to = AVERAGING if name == "average" else DRAWN[phase].get(name)
    if leads_to is None:
        before = vars(backward).copy()
        with pytest.raises(
            ModelError, match=rf"{name.split()[0]}\(\) of a backward pass that is {phase.value}\. .*in one thread"
        ):
            MOVES[name](backward)
        assert vars(backward) == before
    else:
        MOVES[name](backward)
        assert backward.phase is leads_to


def test_the_drawing_has_every_phase_and_every_move() -> None:
    drawing = (backward_pass.__doc__ or "").partition("[Note: phases of a backward pass]")[2].partition("\n\n[Note")[0]
    assert {phase.name for phase in Phase} == set(re.findall(r"\b[A-Z]{4,}\b", drawing))
    assert all(re.search(rf"\b{name.split()[0]}:", drawing) for name in MOVES)


def test_a_task_begins_once() -> None:
    backward = PassState()
    backward.begin(7, early=True)
    backward.average()
    backward.finish()
    with pytest.raises(ModelError, match=r"begin\(\) of a backward pass that is idle"):
        backward.begin(7, early=True)
    backward.begin(8, early=False)
    assert backward.begun_task == 8


def test_which_gradients_are_known_not_to_be_averaged() -> None:
    backward = PassState()
    assert not backward.is_accumulating
    backward.accumulate()
    assert backward.is_accumulating
    backward.ready()
    assert not backward.is_accumulating


def test_what_is_awaited_outlives_the_task_that_brings_it() -> None:
    backward = arrive(WAITING)
    assert backward.awaited == [0]
    backward.begin(3, early=False)
    assert backward.awaited == [0]


class Two(nn.Module):
    """Two outputs, of one layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both."""
        return self.one(x).sum(), self.other(x).sum()


def train(body: Callable[[DistributedDataParallel, list[Phase]], Any]) -> Any:
    """What `body(model, phases)` returns on two ranks; `phases` gets that at each gradient of one parameter."""

    def run(rank: int) -> Any:
        torch.manual_seed(0)
        model, phases = DistributedDataParallel(Two()), list[Phase]()
        model.module.one.weight.register_hook(lambda _: phases.append(model._backward.phase))
        return body(model, phases)

    first, second = run_threads(run, 2)
    if isinstance(first, Exception):
        raise first
    assert first == second
    return first


def x() -> torch.Tensor:
    return torch.ones(3, 2)


def test_a_step_and_an_accumulating_one() -> None:
    def body(model: DistributedDataParallel, phases: list[Phase]) -> None:
        for _ in range(2):
            loss = sum(model(x()))
            phases.append(model._backward.phase)
            loss.backward()
            phases.append(model._backward.phase)
            with model.no_sync():
                loss = sum(model(x()))
            phases.append(model._backward.phase)
            loss.backward()
        return phases

    assert train(body) == [READY, ARMED, IDLE, IDLE, IDLE, READY, DEFERRED, IDLE, IDLE, IDLE]


def test_a_pass_that_waits_for_another_one() -> None:
    def body(model: DistributedDataParallel, phases: list[Phase]) -> Any:
        one, other = model(x())
        other.backward()
        phases.append(model._backward.phase)
        assert model._backward.awaited
        one.backward()
        phases.append(model._backward.phase)
        assert not model._backward.awaited
        model.zero_grad()
        model(x())[0].backward()
        phases.append(model._backward.phase)
        with pytest.raises(UnusedParameters):
            model(x())
        phases.append(model._backward.phase)
        model(x())
        phases.append(model._backward.phase)
        return phases

    assert train(body) == [WAITING, DEFERRED, IDLE, ARMED, WAITING, WAITING, READY]


def test_a_pass_that_fails() -> None:
    def fail(_: torch.Tensor) -> None:
        raise ValueError("in the middle")

    def body(model: DistributedDataParallel, phases: list[Phase]) -> Any:
        for then in (model.forward, model.no_sync):
            loss = sum(model(x()))
            handle = model.module.one.weight.register_hook(fail)
            with pytest.raises(ValueError, match="in the middle"):
                loss.backward()
            handle.remove()
            phases.append(model._backward.phase)
            model.zero_grad()
            if then == model.forward:
                model(x())
            else:
                with model.no_sync():
                    model(x())
            phases.append(model._backward.phase)
        return phases

    assert train(body) == [ARMED, ARMED, READY, ARMED, ARMED, IDLE]


def test_communication_hooks_see_all_of_a_pass_that_is_averaged() -> None:
    def body(model: DistributedDataParallel, phases: list[Phase]) -> Any:
        def reduce(_: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            phases.append(model._backward.phase)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook(None, reduce)
        sum(model(x())).backward()
        return phases

    assert train(body) == [DEFERRED, AVERAGING]
