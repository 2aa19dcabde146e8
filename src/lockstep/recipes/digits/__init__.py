"""The digits recipe: a small CNN on scikit-learn's handwritten digits, at any number of ranks.

    lockstep train digits --nproc 2
    python -m lockstep.recipes.digits                    # alone, or under any launcher

General layout:

* `options`: what can be asked for. It imports no torch: the process that starts the ranks only asks for the options.
* `task`: the data and the model.
* `training`: what every rank does.
"""

from __future__ import annotations

import argparse

from lockstep.recipes.digits.options import add_arguments

__all__ = ["add_arguments", "main"]


def main(namespace: argparse.Namespace) -> int:
    """Run the recipe on this rank. Collective: every rank of the job calls it with the same options.

    Returns:
        0; or 2, on every rank, where the options cannot be used with each other or with the checkpoint
        that they name: rank 0 has then said so in one line on stderr.

    Raises:
        LockstepError: the ranks could not meet, or one of them failed.
    """
    from lockstep.recipes.digits.training import run  # torch, and everything else that takes its time

    return run(namespace)
