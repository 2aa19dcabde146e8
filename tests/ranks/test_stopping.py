"""Decisions that all ranks take alike: `lockstep.any` and `all`, and `World.should_stop` after a signal."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from lockstep.errors import CollectiveMismatch, InputError, InputTypeError, NotInitialized, SetupError
from lockstep.testing import limit_s, run_ranks

each_size = pytest.mark.parametrize("world_size", [1, 2, 3])


def decide(on: tuple[int, ...]) -> tuple[bool, bool, bool]:
    world = lockstep.init()
    flag = world.rank in on
    return lockstep.any(flag), lockstep.all(torch.tensor([flag])), lockstep.any(np.bool_(flag))


@each_size
def test_any_and_all(world_size: int) -> None:
    last, everybody = (world_size - 1,), tuple(range(world_size))
    for on in ((), last, everybody):
        expected = bool(on), len(on) == world_size, bool(on)
        assert run_ranks(decide, world_size, on) == [expected] * world_size


def decide_by_other_words() -> str:
    try:
        lockstep.all(True) if lockstep.init().rank else lockstep.any(False)
    except CollectiveMismatch as error:
        return str(error)
    return ""


def test_any_does_not_meet_all() -> None:
    for text in run_ranks(decide_by_other_words, 2):
        assert "lockstep.any" in text
        assert "lockstep.all" in text


def test_any_without_a_group_and_what_is_no_flag() -> None:
    assert lockstep.any(True)
    assert not lockstep.all(torch.tensor(False))
    for value in (0.3, torch.ones(2), None):
        with pytest.raises(InputTypeError, match=r"lockstep\.any: flag is .* one element"):
            lockstep.any(value)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="process_group is False; combine flags"):
        lockstep.any(True, False)  # type: ignore[arg-type]


def ask_after_the_world() -> list[str]:
    """What each function says of a world of several ranks that was left; nothing of one rank's."""
    with lockstep.init() as world:
        pass
    total = torch.tensor(float(world.rank))
    calls = [
        lambda: lockstep.any(world.rank == 0),
        lambda: lockstep.sum(total),
        lambda: lockstep.all_gather(total[None]),
        lambda: lockstep.metrics.synchronize(lockstep.metrics.Sum()),
    ]
    return [*filter(None, map(error_of_leaving, calls))]


def error_of_leaving(call: Callable[[], object]) -> str:
    try:
        call()
    except NotInitialized as error:
        return str(error)
    return ""


def test_answers_of_one_rank_after_the_world_are_errors() -> None:
    assert run_ranks(ask_after_the_world, 1, init=False) == [[]]
    for said in run_ranks(ask_after_the_world, 2, init=False):
        names = "lockstep.any", "lockstep.sum", "lockstep.all_gather", "metrics.synchronize"
        for name, text in zip(names, said, strict=True):
            assert text.startswith(f"{name} was called after the world of 2 ranks was left")


def stop_after(rank: int, number: int, step: int) -> list[bool]:
    """One rank gets a signal before it asks for the time after `step`."""
    world = lockstep.init()
    world.stop_on(number)
    answers = []
    for current in range(step + 3):
        if current == step and world.rank == rank:
            os.kill(os.getpid(), number)
        answers.append(world.should_stop())
    return answers


@each_size
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_signal_to_one_rank_stops_all_at_the_same_call(world_size: int, number: int) -> None:
    expected = [False, False, True, True, True]
    assert run_ranks(stop_after, world_size, world_size - 1, number, 2) == [expected] * world_size


def life_of_handlers() -> list[object]:
    """What becomes of a handler of the script's: it is called as well, and is there again in the end."""
    heard: list[int] = []
    world = lockstep.init()

    def own(number: int, _: object) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGUSR1, own)
    default = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    seen: list[object] = [signal.getsignal(signal.SIGTERM) is default]
    seen.append(world.should_stop())
    seen.append(signal.getsignal(signal.SIGTERM) is not default)
    signal.raise_signal(signal.SIGUSR1)
    seen.append(world.should_stop() and heard == [signal.SIGUSR1])
    world.stop_on(signal.SIGTERM, signal.SIGUSR2)
    seen.append(signal.getsignal(signal.SIGUSR1) is own and signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN)
    world.shutdown()
    seen.append(signal.getsignal(signal.SIGTERM) is default and signal.getsignal(signal.SIGUSR1) is own)
    with pytest.raises(NotInitialized):
        world.should_stop()
    signal.signal(signal.SIGUSR1, before)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    return seen


def test_handlers_are_caught_when_asked_called_and_restored() -> None:
    assert run_ranks(life_of_handlers, 1) == [[True, False, True, True, True, True]]


def second_ctrl_c() -> str:
    world = lockstep.init()
    world.stop_on(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return "interrupted"
    return "ignored"


def test_second_ctrl_c_interrupts() -> None:
    assert run_ranks(second_ctrl_c, 1) == ["interrupted"]


def sleep_long(begun: Any) -> None:
    begun.set()
    threading.Event().wait()


def end_child() -> int | None:
    """A forked child inherits the handler, and ends by the signal all the same."""
    world = lockstep.init()
    world.should_stop()
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    child = context.Process(target=sleep_long, args=(begun,))
    child.start()
    assert begun.wait(limit_s(20))  # Python forgets signals that come while it still makes ready after a fork
    child.terminate()
    child.join(limit_s(20))
    code = child.exitcode
    child.kill()
    return code


def test_forked_child_ends_by_the_signal() -> None:
    assert run_ranks(end_child, 1) == [-signal.SIGTERM]


def ask_in_thread() -> str:
    world = lockstep.init()
    said = []

    def ask() -> None:
        try:
            world.should_stop()
        except SetupError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    with pytest.raises(InputError, match="at least one"):
        world.stop_on()
    with pytest.raises(InputError, match="SIGKILL"):
        world.stop_on(signal.SIGKILL)
    return said[0]


def test_other_threads_and_signals_that_cannot_be_caught() -> None:
    assert "main thread" in run_ranks(ask_in_thread, 1)[0]
