"""Whatever the loop: one process's answer at any number of ranks, or an error that says what to write."""

from __future__ import annotations

import pytest

import lockstep
from lockstep import batch
from lockstep.testing import limit_s, run_ranks
from loops import EXACT, REFUSED, Site

TOLERANCE = 1e-12
WORLDS = (1, 2, 3, 5)


def distance(name: str) -> float:
    """How far a loop's parameters are from those of one process."""
    batch.reset()  # as in a program that has nothing but this loop
    loop = (EXACT | REFUSED)[name]
    alone, ranks = Site(alone=True), Site(alone=False)
    loop(alone)
    loop(ranks)
    return (ranks.parameters() - alone.parameters()).abs().max().item()


def outcome(name: str) -> float | str:
    """How far a loop is from one process, or its error."""
    try:
        return distance(name)
    except lockstep.LockstepError as error:
        return f"{type(error).__name__}: {error}"


def outcomes(names: list[str]) -> dict[str, float | str]:
    """For each loop how far it is from one process, or its error."""
    return {name: outcome(name) for name in names}


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.core), 3, 5])
def test_loops_give_the_answer_of_one_process(world_size: int) -> None:
    for found in run_ranks(outcomes, world_size, list(EXACT), timeout=limit_s(120)):
        assert {name: what for name, what in found.items() if not (isinstance(what, float) and what <= TOLERANCE)} == {}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", REFUSED)
def test_loops_that_no_rank_can_read_say_what_to_write(name: str, world_size: int) -> None:
    found = run_ranks(distance, world_size, name, expect_errors=True)
    if world_size == 1:
        assert found[0] <= TOLERANCE
        return
    right = [what for what in found if isinstance(what, float) and what <= TOLERANCE]
    cures = "model.samples(n)", "Call the model once per"
    errors = [str(what) for what in found if isinstance(what, lockstep.LockstepError)]
    said = [text for text in errors if any(cure in text for cure in cures)]
    assert len(right) == world_size or said, found
