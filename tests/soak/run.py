"""Runs random programs of collectives against a model, for as long as one likes.

    python tests/soak/run.py --world-size 3 --minutes 10
    python tests/soak/run.py --world-size 3 --steps 17,4,2039     a program that failed

Prints the seed of each program as it goes. A failure ends it, with the step, the difference and the command to repeat
it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from random_programs.program import draw_program
from random_programs.runner import Ledger, seeds_from, soak

__all__ = ["main"]

_STEPS_PER_PROGRAM = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python tests/soak/run.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--world-size", type=int, default=3, metavar="N", help="number of ranks (default 3)")
    parser.add_argument("--backend", default="lockstep", help="for init_process_group (default lockstep)")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to continue (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next has the next (default 0)")
    parser.add_argument("--steps", metavar="SEED,…", help="run this one program, a seed for each step")
    parser.add_argument("--show", action="store_true", help="print the steps of the program and do not run it")
    options = parser.parse_args(arguments)
    if options.steps is not None:
        seeds = [int(step) for step in options.steps.split(",")]
    else:
        seeds = seeds_from(options.seed, _STEPS_PER_PROGRAM)
    if options.show:
        for number, step in enumerate(draw_program(seeds, options.world_size)):
            print(f"{number}: {step}")
        return 0
    try:
        if options.steps is not None:
            soak(seeds, options.world_size, options.backend)
        else:
            _go_on(options)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _go_on(options: argparse.Namespace) -> None:
    """Program after program, until the time is over."""
    ledger, seed = Ledger(), options.seed
    until = time.monotonic() + 60 * options.minutes
    while time.monotonic() < until:
        print(f"seed {seed}", flush=True)
        seeds = seeds_from(seed, _STEPS_PER_PROGRAM)
        ledger.enter(len(seeds), soak(seeds, options.world_size, options.backend))
        seed += 1
    print(f"no mismatch: {ledger}")
    ledger.check()


if __name__ == "__main__":
    sys.exit(main())
