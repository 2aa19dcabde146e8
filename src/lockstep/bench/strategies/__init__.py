"""`lockstep bench strategies`: compares all ways to train the same model on the same data, in turns.

General layout:

* `ways`: the ways, who starts each, and why one cannot run here.
* `jobs`: the processes of each way, which wait for orders; `turns`: makes them take turns.
* `task`: model, data, and the length of an epoch; `setups`: sets up each way, with its usual calls; `epochs`:
  runs an epoch, and times its parts.
* `worker`: the program of a rank.
* `report`: tables of a result; `plots`: its plot.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.bench.pages import Block
from lockstep.bench.results import Result
from lockstep.bench.session import Session
from lockstep.bench.strategies.ways import WAYS
from lockstep.recipes.options import check_packages, existing_folder, whole_number
from lockstep.similar import suggest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "blocks", "draw", "measure"]

SUMMARY = "every way to train: Lockstep's, torch's, and those of other libraries"

DESCRIPTION = """\
Train one model on one data set in every available way, and report how long an epoch takes, where the time of a step
goes, how much memory it needs, and whether all ways learn the same. Ways take turns, an epoch each, until the time is
up, so that noise affects all of them alike.
"""

_PACKAGES = {"digits": {"sklearn": "scikit-learn"}, "imagenet": {"PIL": "Pillow"}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options to `parser`. Does not import torch."""
    group = parser.add_argument_group("what is trained")
    group.add_argument("--recipe", choices=("digits", "imagenet"), default="digits", help="default: %(default)s")
    group.add_argument(
        "--ways",
        type=_names,
        metavar="A,B",
        help=f"ways to compare with `single`, of {', '.join(WAYS)} (default: all that can run here)",
    )
    group.add_argument(
        "--epochs",
        type=whole_number(1),
        metavar="N",
        default=5,
        help="epochs per training, which is repeated (default: 5)",
    )
    group.add_argument(
        "--batch-size", type=whole_number(1), metavar="N", default=64, help="global batch size (default: 64)"
    )
    group.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="default: %(default)s")
    group.add_argument(
        "--images", type=whole_number(0), metavar="N", default=0, help="most images per epoch (default: 0, all)"
    )
    group.add_argument(
        "--workers", type=whole_number(0), metavar="N", default=0, help="loader processes per rank (default: 0)"
    )
    imagenet = parser.add_argument_group("imagenet")
    imagenet.add_argument(
        "--data",
        type=existing_folder,
        metavar="DIR",
        help="folder with train/ and val/ (default: generated shapes)",
    )
    imagenet.add_argument("-a", "--arch", default="tiny", help="default: %(default)s, without batch normalization")
    imagenet.add_argument(
        "--size",
        type=whole_number(8),
        metavar="N",
        default=64,
        help="edge length of the images in pixels (default: 64)",
    )


def measure(options: argparse.Namespace, session: Session) -> None:
    """Measure all ways, and add the results to the session.

    Raises:
        SetupError: a package that the recipe needs is missing.
        InputError: options cannot be used.
    """
    check_packages(options.recipe, _PACKAGES[options.recipe])
    from lockstep.bench.strategies.turns import run

    run(options, session)


def blocks(result: Result) -> Sequence[Block]:
    """The tables of a result."""
    from lockstep.bench.strategies import report

    return report.blocks(result)


def draw(result: Result) -> Figure:
    """The plot of a result."""
    from lockstep.bench.strategies import plots

    return plots.draw(result)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names or [text]:
        if name not in WAYS:
            hint = suggest(name, WAYS) or "."
            raise argparse.ArgumentTypeError(f"unknown way {name!r}{hint} Ways: {', '.join(WAYS)}")
    return names
