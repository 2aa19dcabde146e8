"""`python -m apex.parallel.multiproc main.py …`: one process per GPU of this host, or per core if there is none.

Each gets `--rank R` and `--world-size N` as in Apex, which replace given ones, and the variables
of `lockstep run`, whose guarantees hold: output of all ranks, prefixed with the rank, and no process left behind.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lockstep import env
from lockstep.errors import LaunchError
from lockstep.launch.command import exit_code_of
from lockstep.launch.config import LaunchConfig, resolve_nproc
from lockstep.launch.supervisor import launch_job

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks and wait for them.

    Args:
        arguments: a script and its arguments; by default those of this process.

    Returns:
        The exit code of the job.

    Raises:
        LaunchError: the script is missing, or does not exist.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        raise LaunchError("name a script: python -m apex.parallel.multiproc main.py [args ...]")
    script, rest = words[0], _without(_without(words[1:], "--rank"), "--world-size")
    nproc = resolve_nproc("auto", env.snapshot())
    return launch_job(
        LaunchConfig(target=script, args=("--world-size", str(nproc), *rest), nproc=nproc, local_rank_option="--rank")
    )


def _without(words: list[str], option: str) -> list[str]:
    kept, skips = [], False
    for word in words:
        if skips or word.startswith(f"{option}="):
            skips = False
        elif word == option:
            skips = True
        else:
            kept.append(word)
    return kept


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
