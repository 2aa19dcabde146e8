"""The ImageNet program: any image classifier on a folder of JPEGs, by one of six strategies, with one answer.

    lockstep train imagenet DIR --nproc 4 -a resnet50
    python -m lockstep.recipes.imagenet DIR -a resnet50       # alone, or under any launcher

General layout:

* `options`: what can be asked for; `starting`: who starts how many processes. These two import no torch.
* `listing`: the files of an ImageFolder, listed once by rank 0; `images`: a file as a network gets it; `datasets`: both
  parts of a folder, and loaders of them; `broken`: files that could not be read.
* `models`: networks by name; `schedule`: the learning rate of every step.
* `strategies`: single, dp, ddp, apex, horovod … around a network; `evaluation`: every image counted once.
* `training`: what every rank does; `spawning`: processes that one starts by itself; `reporting`: what a run
  says; `waiting`: what it waits for.
* `shapes`: `lockstep data make-imagenet`.

This module is all that the process which starts the ranks imports.
"""

from __future__ import annotations

import argparse

from lockstep.recipes.imagenet.options import add_options
from lockstep.recipes.imagenet.starting import choose_strategy, start
from lockstep.recipes.options import check_packages

__all__ = ["add_arguments", "main", "start"]

_PACKAGES = {"PIL": "Pillow", "rich": "rich", "matplotlib": "matplotlib", "tensorboard": "tensorboard"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the program's options to `parser`. Local; imports no torch.

    Raises:
        SetupError: a package of the "imagenet" extra is missing.
    """
    check_packages("imagenet", _PACKAGES)
    add_options(parser)
    # How `lockstep train` hands on --nproc where one process starts the others, or has replicas.
    parser.add_argument("--processes", default="auto", help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> int:
    """Run the program in this process. Collective: every rank of the job calls it with the same options.

    Returns:
        0; or 2, on every rank, where the options cannot be used, which rank 0 has then said in one line on stderr.

    Raises:
        LockstepError: the ranks could not meet, or one of them failed.
    """
    if choose_strategy(options) == "spawn":
        from lockstep.recipes.imagenet.spawning import spawn

        return spawn(options)
    from lockstep.recipes.imagenet.training import run  # torch, and everything else that takes its time

    return run(options)
