"""What torch's profilers see of a step of `DistributedDataParallel`, and that a step without one makes no ranges."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity

from ddp_checks import backends, data, mlp
from lockstep import DistributedDataParallel
from lockstep.testing import run_ranks

PREFIX = "lockstep.DistributedDataParallel."


def by_torch_profiler() -> Any:
    return torch.profiler.profile(activities=[ProfilerActivity.CPU])


def by_autograd_profiler() -> Any:
    return profiler.profile()


def step(model: DistributedDataParallel) -> None:
    model(data(3, 4)).square().mean().backward()
    model.zero_grad()


def ranges_of_a_step(profile: Callable[[], Any]) -> dict[str, int]:
    """The engine's ranges in the trace of one step among others: name -> how often."""
    model = DistributedDataParallel(mlp().double())
    step(model)
    with profile() as trace:
        step(model)
    step(model)
    return {each.key.removeprefix(PREFIX): each.count for each in trace.key_averages() if each.key.startswith(PREFIX)}


@backends
@pytest.mark.parametrize("profile", [by_torch_profiler, by_autograd_profiler])
def test_a_trace_shows_the_engine(profile: Callable[[], Any], backend: str) -> None:
    assert run_ranks(ranges_of_a_step, 2, profile, backend=backend) == [{"forward": 1, "reduce": 1}] * 2


def ranges_made() -> tuple[int, int]:
    """How many ranges two steps make without a profiler, and how many one makes with one."""
    model, made = DistributedDataParallel(mlp().double()), []
    original = profiler.record_function

    class Counted(original):  # type: ignore[misc, valid-type]
        def __init__(self, name: str, *args: Any) -> None:
            made.append(name)
            super().__init__(name, *args)

    profiler.record_function = Counted  # type: ignore[misc]
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, profiler, "record_function", original)
        step(model)
        step(model)
        without = len(made)
        with by_autograd_profiler():
            step(model)
    return without, len(made) - without


def test_no_range_is_made_without_a_profiler() -> None:
    assert run_ranks(ranges_made, 2) == [(0, 2)] * 2
