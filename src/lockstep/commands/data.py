"""`lockstep data`: generates data to try a recipe with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.commands.parsing import Parser
from lockstep.errors import InputError, LaunchError
from lockstep.launch.command import USAGE_CODE
from lockstep.recipes.options import check_packages, whole_number
from lockstep.similar import suggest

__all__ = ["main"]

_MAKE_IMAGENET = "make-imagenet"

_OVERVIEW = f"""\
usage: lockstep data {_MAKE_IMAGENET} DIR [options]

  {_MAKE_IMAGENET}   generate a small ImageFolder (train/ and val/) for `lockstep train imagenet`

`lockstep data {_MAKE_IMAGENET} --help` shows its options
"""

_DESCRIPTION = """\
Generate a small, learnable ImageFolder: DIR/train and DIR/val, a folder per class, JPEGs of shapes. The same seed
gives the same images everywhere.
"""

_EPILOG = """\
example:
  lockstep data make-imagenet shapes
  lockstep train imagenet shapes --nproc 2 -a tiny --size 32 -b 32 --epochs 20 --lr 0.8 --schedule cosine --warmup 1
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: the words after `lockstep data`.

    Returns:
        The exit code.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_OVERVIEW, end="")
        return 0 if arguments else USAGE_CODE
    name, *rest = arguments
    if name != _MAKE_IMAGENET:
        raise LaunchError(f"unknown data {name!r}{suggest(name, [_MAKE_IMAGENET]) or '.'} Data: {_MAKE_IMAGENET}")
    check_packages("imagenet", {"PIL": "Pillow"})
    return _make_imagenet(rest)


def _make_imagenet(arguments: Sequence[str]) -> int:
    from lockstep.recipes.imagenet.shapes import ShapesFolder, write_shapes

    default = ShapesFolder(Path())
    parser = Parser(
        prog=f"lockstep data {_MAKE_IMAGENET}",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write to; must be new or empty")
    for option, text in (
        ("--classes", f"number of classes; each is a shape in a colour (default: {default.classes})"),
        ("--images", f"number of training images, over all classes (default: {default.images})"),
        ("--val-images", "number of validation images, over all classes (default: a quarter of --images)"),
        ("--size", f"edge length in pixels (default: {default.size})"),
        ("--seed", f"random seed (default: {default.seed})"),
        ("--quality", f"JPEG quality, 1 to 95 (default: {default.quality})"),
    ):
        least = 0 if option == "--seed" else 1
        parser.add_argument(option, type=whole_number(least), metavar="N", help=text)
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    what = ShapesFolder(**given)
    try:
        num_train, num_val = write_shapes(what)
    except InputError as mistake:
        raise LaunchError(str(mistake)) from mistake
    print(f"{what.folder}: {num_train:,} training and {num_val:,} validation images in {what.classes} classes")
    return 0
