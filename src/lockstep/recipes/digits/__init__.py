"""The digits recipe: trains a small CNN on scikit-learn's handwritten digits, on any number of ranks.

    lockstep train digits --nproc 2
    python -m lockstep.recipes.digits                    # alone, or under any launcher

General layout:

* `options`: the options. Does not import torch, which the process that starts the ranks does not need.
* `task`: the data and the model.
* `training`: the program of each rank.
"""

from __future__ import annotations

import argparse

from lockstep.recipes.digits.options import add_arguments

__all__ = ["add_arguments", "main"]


def main(namespace: argparse.Namespace) -> int:
    """Run the recipe on this rank. Collective: every rank of the job calls it with the same options.

    Returns:
        0; or 2, on every rank, if options contradict each other or the checkpoint that they name; rank 0 has
        then printed the error in one line on stderr.

    Raises:
        LockstepError: the ranks could not meet, or one of them failed.
    """
    from lockstep.recipes.digits.training import run  # imports torch and other slow modules

    return run(namespace)
