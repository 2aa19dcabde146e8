"""The ImageNet program: trains any image classifier on a folder of JPEGs, by one of six strategies.

    lockstep train imagenet DIR --nproc 4 -a resnet50
    python -m lockstep.recipes.imagenet DIR -a resnet50       # alone, or under any launcher

General layout:

* `options`: the options; `starting`: who starts how many processes. These two do not import torch.
* `listing`: the files of an ImageFolder, listed once by rank 0; `images`: reads and augments files; `datasets`: the
  training and validation images, and their loaders; `broken`: files that cannot be read.
* `models`: networks by name; `schedule`: the learning rate of every step.
* `strategies`: single, dp, ddp, apex, horovod …; `evaluation`: counts every image once.
* `training`: the program of each rank; `spawning`: starts ranks by torch.multiprocessing; `reporting`: output and
  logs; `waiting`: time that is lost to waiting.
* `shapes`: generates images, for `lockstep data make-imagenet`.

The process that starts the ranks imports this module only.
"""

from __future__ import annotations

import argparse

from lockstep.recipes.imagenet.options import add_options
from lockstep.recipes.imagenet.starting import choose_strategy, start
from lockstep.recipes.options import check_packages

__all__ = ["add_arguments", "main", "start"]

_PACKAGES = {"PIL": "Pillow", "rich": "rich", "matplotlib": "matplotlib", "tensorboard": "tensorboard"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the program's options to `parser`. Local; does not import torch.

    Raises:
        SetupError: a package of the "imagenet" extra is missing.
    """
    check_packages("imagenet", _PACKAGES)
    add_options(parser)
    # `lockstep train` passes --nproc on by this if one process starts the others, or has replicas.
    parser.add_argument("--processes", default="auto", help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> int:
    """Run the program in this process. Collective: every rank of the job calls it with the same options.

    Returns:
        0; or 2, on every rank, if the options cannot be used, after rank 0 has printed the error on stderr.

    Raises:
        LockstepError: the ranks could not meet, or one of them failed.
    """
    if choose_strategy(options) == "spawn":
        from lockstep.recipes.imagenet.spawning import spawn

        return spawn(options)
    from lockstep.recipes.imagenet.training import run  # imports torch and other slow modules

    return run(options)
