"""Random training programs give what one process gives, in float64 to 1e-12, or the error that a feature of theirs has.

Some dozens of programs, the same each time; others each time where FUZZ_MINUTES is set (`make nightly`), for so long. A
program that fails is shown as steps, with the command that runs it again.
"""

from __future__ import annotations

import argparse
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.batch import BatchShare
from lockstep.errors import LockstepError
from lockstep.testing import run_ranks
from training_programs import EVENTS, HOOKS, LOOPS, Program, draw
from training_runs import train

IS_NIGHTLY = "FUZZ_MINUTES" in os.environ
MINUTES = float(os.environ.get("FUZZ_MINUTES", "1"))
PROGRAMS = {2: 120, 3: 60}
PROGRAMS_AT_ONCE = 20
TOLERANCE = 1e-12
BITS_OF_SEED = 30


def farthest(ours: dict[str, Tensor], alone: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of two states relative to the values, and where it is."""
    worst = (0.0, "")
    assert ours.keys() == alone.keys()
    for name, value in alone.items():
        if value.numel():
            difference = (ours[name] - value).abs().max().item() / max(1.0, value.abs().max().item())
            # A difference that is not a number is one.
            if not difference <= worst[0]:
                worst = (difference, name)
    return worst


def check(program: Program) -> str:
    """Run a program on these ranks. Returns what is wrong with it; "" for nothing. Collective."""
    again = f"python tests/fuzz/test_fuzz.py --world-size {dist.get_world_size()} --seed {program.seed}"
    try:
        ours = train(program, with_engine=True)
    except Exception as error:
        excused = program.may_raise if isinstance(error, LockstepError) else program.known_faults
        if any(part in str(error) for part in excused):
            return ""
        raise AssertionError(f"{type(error).__name__}: {error}\n{program}\nTo see it again: {again}") from error
    difference, name = farthest(ours, train(program, with_engine=False))
    return "" if difference <= TOLERANCE else f"{name} differs by {difference:.2g}\n{program}\nTo see it again: {again}"


def check_all(seeds: list[int]) -> list[str]:
    """What is wrong with any of these programs. Collective."""
    torch.set_num_threads(1)
    return [wrong for wrong in (check(draw(seed)) for seed in seeds) if wrong]


def run_some(seeds: list[int], world_size: int) -> None:
    for wrong in run_ranks(check_all, world_size, seeds):
        assert not wrong, wrong[0]


@pytest.mark.timeout(60 * MINUTES + 300)
@pytest.mark.parametrize("world_size", PROGRAMS)
def test_training_programs(world_size: int) -> None:
    until = time.monotonic() + 60 * MINUTES / len(PROGRAMS)
    seed = time.time_ns() % (1 << BITS_OF_SEED) if IS_NIGHTLY else 0
    num_programs = 0
    while num_programs < PROGRAMS[world_size] or (IS_NIGHTLY and time.monotonic() < until):
        run_some(list(range(seed, seed + PROGRAMS_AT_ONCE)), world_size)
        seed, num_programs = seed + PROGRAMS_AT_ONCE, num_programs + PROGRAMS_AT_ONCE
    print(f"{world_size} ranks: {num_programs} programs")


# ---- that the fuzz itself sees what is wrong ------------------------------------------------------------------


def check_without_weights(seeds: list[int]) -> list[str]:
    whole = BatchShare.weight
    BatchShare.weight = property(lambda _: 1.0)  # type: ignore[method-assign, assignment]
    try:
        return check_all(seeds)
    finally:
        BatchShare.weight = whole  # type: ignore[method-assign]


def is_simple(program: Program) -> bool:
    """Its last batch divides into 3 and 2 samples, and every pass is stepped by."""
    may_fail = program.may_raise or program.num_samples != 17
    return not may_fail and all(one.syncs and one.zero == "none" for one in program.passes)


def test_a_wrong_answer_is_found_and_its_program_shown() -> None:
    seed = next(seed for seed in range(1000) if is_simple(draw(seed)))
    for (wrong,) in run_ranks(check_without_weights, 2, [seed]):
        assert f"program {seed}: DistributedDataParallel(net, " in wrong
        assert "zero_grad(none), " in wrong
        assert wrong.endswith(f"python tests/fuzz/test_fuzz.py --world-size 2 --seed {seed}")


def test_programs_have_everything() -> None:
    programs = [draw(seed) for seed in range(400)]
    passes = [one for program in programs for _, passes in program.epochs for one in passes]
    assert {loop for program in programs for loop, _ in program.epochs} == set(LOOPS)
    assert {program.hook for program in programs} == set(HOOKS)
    assert len({program.checkpoint for program in programs}) == 5
    assert {one.event for one in passes} == {"", *EVENTS}
    assert {one.zero for one in passes} == {"none", "zeros", ""}
    assert {one.scale for one in passes} == {"", "in place", "replace", "clip"}
    for name in ("tied", "channels_last", "sparse", "averaged"):
        assert {getattr(program, name) for program in programs} == {True, False}
    for name in ("static_graph", "find_unused_parameters", "gradient_as_bucket_view", "bucket_cap_mb"):
        assert any(name in program.options for program in programs)
    assert sum(not program.may_raise for program in programs) > 200
    assert str(draw(7)) == str(draw(7))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run one program again.")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    print(draw(arguments.seed))
    import test_fuzz  # ranks import functions by the names of their modules

    test_fuzz.run_some([arguments.seed], arguments.world_size)
