"""Whatever the loop: one process's answer at any number of ranks, or an error that says what to write."""

from __future__ import annotations

import pytest

import lockstep
from lockstep.testing import run_ranks
from loops import EXACT, REFUSED, Site

TOLERANCE = 1e-12
WORLDS = (1, 2, 3, 5)


def outcomes(names: list[str]) -> dict[str, float | str]:
    """For each loop how far it is from one process, or its error."""
    found: dict[str, float | str] = {}
    for name in names:
        loop = (EXACT | REFUSED)[name]
        alone, ranks = Site(alone=True), Site(alone=False)
        loop(alone)
        try:
            loop(ranks)
        except lockstep.LockstepError as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = (ranks.parameters() - alone.parameters()).abs().max().item()
    return found


@pytest.mark.parametrize("world_size", WORLDS)
def test_loops_give_the_answer_of_one_process(world_size: int) -> None:
    for found in run_ranks(outcomes, world_size, list(EXACT), timeout=120):
        assert {name: what for name, what in found.items() if not (isinstance(what, float) and what <= TOLERANCE)} == {}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", REFUSED)
def test_loops_that_no_rank_can_read_say_what_to_write(name: str, world_size: int) -> None:
    found = [one[name] for one in run_ranks(outcomes, world_size, [name])]
    if world_size == 1:
        assert found[0] <= TOLERANCE
        return
    right = [what for what in found if isinstance(what, float) and what <= TOLERANCE]
    said = [what for what in found if isinstance(what, str) and "model.samples(n)" in what]
    assert len(right) == world_size or said, found
