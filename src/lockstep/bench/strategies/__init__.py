"""`lockstep bench strategies`: every way to train one model on one data set, each in turn.

General layout:

* `ways`: what is compared, who starts it, and why it may not run here.
* `jobs`: the processes of all ways, which wait for orders; `turns`: has them take turns.
* `task`: model, data, and how much of an epoch there is time for; `setups`: every way as its users write it; `epochs`:
  an epoch, and the time of its parts.
* `worker`: what a rank does.
* `report`: tables of a result; `plots`: its picture.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.bench.pages import Block
from lockstep.bench.results import Result
from lockstep.bench.session import Session
from lockstep.bench.strategies.ways import WAYS
from lockstep.recipes.options import check_packages, existing_folder, whole_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "blocks", "draw", "measure"]

SUMMARY = "time every way to train: ours, torch's, and of other libraries"

DESCRIPTION = """\
Train one model on one data set by every way there is here, and say how long an epoch takes, where the time of a step
goes, what it needs in memory, and whether all ways learn the same. Ways take turns, an epoch each, until the time is
spent: what disturbs the machine disturbs all of them alike.
"""

_PACKAGES = {"digits": {"sklearn": "scikit-learn"}, "imagenet": {"PIL": "Pillow"}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options. Imports no torch."""
    group = parser.add_argument_group("what is trained")
    group.add_argument("--recipe", choices=("digits", "imagenet"), default="digits", help="default: %(default)s")
    group.add_argument(
        "--ways",
        type=_names,
        metavar="A,B",
        help=f"only these, and `single`: {', '.join(WAYS)} (default: all that can run here)",
    )
    group.add_argument(
        "--epochs", type=whole_number(1), metavar="N", default=5, help="of a training, which is repeated (default: 5)"
    )
    group.add_argument(
        "--batch-size", type=whole_number(1), metavar="N", default=64, help="of all ranks together (default: 64)"
    )
    group.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="default: %(default)s")
    group.add_argument(
        "--images", type=whole_number(0), metavar="N", default=0, help="of an epoch, at most (default: 0, all)"
    )
    group.add_argument(
        "--workers", type=whole_number(0), metavar="N", default=0, help="loader processes of each rank (default: 0)"
    )
    imagenet = parser.add_argument_group("imagenet")
    imagenet.add_argument(
        "--data",
        type=existing_folder,
        metavar="DIR",
        help="with train/ and val/ in it (default: shapes, drawn for the run)",
    )
    imagenet.add_argument("-a", "--arch", default="tiny", help="default: %(default)s, without batch normalization")
    imagenet.add_argument(
        "--size", type=whole_number(8), metavar="N", default=64, help="edge of the images, in pixels (default: 64)"
    )


def measure(options: argparse.Namespace, session: Session) -> None:
    """Measure all ways, and hand the session what came of it.

    Raises:
        SetupError: a package that the recipe needs is missing.
        InputError: options that cannot be used.
    """
    check_packages(options.recipe, _PACKAGES[options.recipe])
    from lockstep.bench.strategies.turns import run

    run(options, session)


def blocks(result: Result) -> Sequence[Block]:
    """The tables of a result."""
    from lockstep.bench.strategies import report

    return report.blocks(result)


def draw(result: Result) -> Figure:
    """The picture of a result."""
    from lockstep.bench.strategies import plots

    return plots.draw(result)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names or [text]:
        if name not in WAYS:
            close = difflib.get_close_matches(name, WAYS, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise argparse.ArgumentTypeError(f"there is no way {name!r}{hint}; there are: {', '.join(WAYS)}")
    return names
