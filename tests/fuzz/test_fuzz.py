"""Random training programs give what one process gives, in float64 to 1e-12, or the error that a feature of theirs has.

Half a minute of programs on two quiet cores, the same each time; others each time where FUZZ_MINUTES is set (`make
nightly`), for so long. A program that fails is shown as steps, with the command that runs it again.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import batch
from lockstep.batch.share import BatchShare
from lockstep.errors import LockstepError
from lockstep.testing import run_ranks
from training_programs import CHANGES, CHECKPOINTS, EVENTS, FROZEN, HOOKS, LOOPS, Program, draw
from training_runs import train

IS_NIGHTLY = "FUZZ_MINUTES" in os.environ
MINUTES = float(os.environ.get("FUZZ_MINUTES", "1"))
# By world size. Programs of more ranks take longer, on two cores.
PROGRAMS = {1: 40, 2: 400, 3: 160, 5: 80}
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
    batch.reset()  # each begins as in a process of its own
    again = f"python tests/fuzz/test_fuzz.py --world-size {dist.get_world_size()} --seed {program.seed}"
    try:
        ours = train(program, with_engine=True)
    except Exception as error:
        excused = program.may_raise(dist.get_world_size())
        if isinstance(error, LockstepError) and any(part in str(error) for part in excused):
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


def first_seed(world_size: int) -> int:
    """Where the programs of CI begin: each world size has others."""
    return 1000 * world_size


@pytest.mark.timeout(60 * MINUTES + 300)
@pytest.mark.parametrize("world_size", PROGRAMS)
def test_training_programs(world_size: int) -> None:
    until = time.monotonic() + 60 * MINUTES * PROGRAMS[world_size] / sum(PROGRAMS.values())
    seed = time.time_ns() % (1 << BITS_OF_SEED) if IS_NIGHTLY else first_seed(world_size)
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
    may_fail = program.may_raise(2) or program.num_samples != 17
    return not may_fail and all(one.syncs and one.zero == "none" for one in program.passes)


def test_a_wrong_answer_is_found_and_its_program_shown() -> None:
    seed = next(seed for seed in range(1000) if is_simple(draw(seed)))
    for (wrong,) in run_ranks(check_without_weights, 2, [seed]):
        assert f"program {seed}: DistributedDataParallel(net, " in wrong
        assert "zero_grad(none), " in wrong
        assert wrong.endswith(f"python tests/fuzz/test_fuzz.py --world-size 2 --seed {seed}")


def test_programs_have_everything() -> None:
    """Those that CI runs: each feature is in some that no error may end, or is there for its error."""
    counts: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    for world_size, number in PROGRAMS.items():
        for program in map(draw, range(first_seed(world_size), first_seed(world_size) + number)):
            (errors if program.may_raise(world_size) else counts).update(["programs", *program.features])
    for_their_errors = {"event: assign"}
    expected = {"tied", "channels_last", "sparse", "averaged", "again", "evaluates", "keeps", "leaves_out", "no_sync"}
    expected |= {"static_graph", "find_unused_parameters", "gradient_as_bucket_view", "bucket_cap_mb"}
    for kind, values in {
        "loop": LOOPS,
        "batches": CHANGES,
        "checkpoint": CHECKPOINTS,
        "hook": HOOKS,
        "event": ["", *EVENTS],
        "frozen": ["", *FROZEN],
        "zero_grad": ["none", "zeros", ""],
        "gradients": ["", "in place", "replace", "clip"],
        "forward passes": [1, 2],
    }.items():
        expected |= {f"{kind}: {value}" for value in values}
    assert {feature for feature in expected - for_their_errors if counts[feature] < 5} == set()
    assert {feature for feature in for_their_errors if errors[feature] < 5} == set()
    assert counts["programs"] > 2 * errors["programs"]
    assert str(draw(7)) == str(draw(7))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run one program again.")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    print(draw(arguments.seed))
    import test_fuzz  # ranks import functions by the names of their modules

    test_fuzz.run_some([arguments.seed], arguments.world_size)
