"""Random programs of collectives, messages, groups and threads, checked against one process: no mismatch, no leak.

Half a minute in all, and SOAK_MINUTES where that is set (`make nightly`): the same programs each time in the one case,
others each time in the other. hypothesis draws programs and finds the shortest that fails; its message ends with the
command that runs that one again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from lockstep.shm.algorithms import SharedMemoryAlgorithms
from lockstep.testing import run_ranks
from random_programs import Ledger, runner, seeds_from, soak
from random_programs.program import Call, Drop, Make, Together, Wait, draw_program

MINUTES = float(os.environ.get("SOAK_MINUTES", "0.5"))
IS_NIGHTLY = "SOAK_MINUTES" in os.environ
# Five ranks on two cores take longest to come to anything.
SHARES = {2: 0.28, 3: 0.3, 5: 0.42}
EXAMPLES_PER_ROUND = 25

# Lists of lists, because hypothesis draws single ones rather short: 35 steps on average.
step_seeds = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20)
programs = st.lists(step_seeds, min_size=1, max_size=20).map(lambda parts: [one for part in parts for one in part])
# For the shortest program that fails.
SHRINKING_S = 600


def round_of(first_seed: int, run: Callable[[list[int]], None]) -> None:
    """A few programs that follow from a seed; the shortest that fails is what the error shows."""

    @seed(first_seed)
    @settings(
        max_examples=EXAMPLES_PER_ROUND,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs)
    def one_round(seeds: list[int]) -> None:
        try:
            run(seeds)
        except AssertionError as error:
            print(error)  # at once, should finding a shorter one take too long
            raise

    one_round()


@pytest.mark.timeout(60 * MINUTES + SHRINKING_S)
@pytest.mark.parametrize("world_size", SHARES)
def test_random_programs(world_size: int) -> None:
    ledger = Ledger()
    until = time.monotonic() + 60 * MINUTES * SHARES[world_size]
    number = time.time_ns() if IS_NIGHTLY else 0
    while time.monotonic() < until:
        round_of(number, lambda seeds: ledger.enter(len(seeds), soak(seeds, world_size)))
        number += 1
    print(f"{world_size} ranks: {ledger}")
    ledger.check()
    assert ledger.num_programs >= EXAMPLES_PER_ROUND


# ---- that the soak itself sees what is wrong ------------------------------------------------------------------------


def spoil(seeds: list[int], how: str) -> Any:
    """A program on ranks on which one thing is broken."""
    if how == "broadcast":
        SharedMemoryAlgorithms.broadcast = lambda *_: None
    elif how == "descriptor":
        shutdown = dist.destroy_process_group
        dist.destroy_process_group = lambda *arguments: (os.dup(0), shutdown(*arguments))
        runner._has_run_before = True
    elif how == "raise" and int(os.environ["RANK"]) == 1:
        SharedMemoryAlgorithms.all_to_all = int
    return runner._on_rank(seeds, "lockstep")


def first_with(kind: str, world_size: int) -> list[int]:
    """A short program whose last step is that call."""
    for number in range(100_000):
        (step,) = draw_program(seeds_from(number, 1), world_size)
        if isinstance(step, Call) and str(step).startswith(kind) and "[0" not in str(step):
            return seeds_from(number, 1)
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("broadcast", "broadcast(int64[300]", r"in step 0 of 1, broadcast\(int64\[300\] .*: result 0 differs at "),
        (
            "raise",
            "all_to_all(",
            r"rank 1 in step 0 of 1, all_to_all\(.*: TypeError: int\(\) takes",
        ),
        ("descriptor", "barrier(", r"is left with open /dev/null after 1 steps"),
    ],
)
def test_trouble_is_found(how: str, kind: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = first_with(kind, 2)

    def run(_: object, world_size: int, seeds: list[int], _backend: str, **options: Any) -> list[Any]:
        return run_ranks(spoil, world_size, seeds, how, **options)

    monkeypatch.setattr(runner, "run_ranks", run)
    with pytest.raises(AssertionError, match=says) as caught:
        soak(seeds, 2)
    command = f"python tests/soak/run.py --world-size 2 --steps {seeds[0]}"
    assert str(caught.value).endswith(f"\nTo see it again: {command}")


def test_programs_have_everything() -> None:
    steps = [step for number in range(60) for step in draw_program(seeds_from(number, 60), 3)]
    assert {type(step) for step in steps} == {Make, Drop, Call, Together, Wait}
    calls = [step for step in steps if isinstance(step, Call)]
    assert len({type(call.operation) for call in calls}) == 18
    assert {call.is_async for call in calls} == {True, False}
    assert {call.operation.dtype for call in calls} >= {torch.bool, torch.bfloat16, torch.float8_e5m2, torch.complex64}
    assert {len(call.operation.shape) for call in calls} == {0, 1, 2, 3}
    assert {call.operation.layout for call in calls} == {"plain", "gaps", "transposed", "slice"}
    assert [str(step) for step in draw_program([1, 2, 3], 3)] == [str(step) for step in draw_program([1, 2, 3], 3)]


def test_growth_is_found() -> None:
    usage = runner.measure_usage()
    ledger = Ledger()
    for number in range(40):
        grown = type(usage)(usage.descriptors, 0, 1, usage.malloc_kib + 500 * number, usage.python_blocks)
        ledger.enter(3, {17: grown})
    with pytest.raises(AssertionError, match=r"process 17 holds \d+ KiB more: 40 programs, 120 steps"):
        ledger.check()
