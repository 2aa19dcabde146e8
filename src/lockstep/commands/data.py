"""`lockstep data`: data to try a recipe with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.commands.parsing import Parser, suggest
from lockstep.errors import InputError, LaunchError
from lockstep.launch.command import USAGE_CODE
from lockstep.recipes.options import check_packages, whole_number

__all__ = ["main"]

_MAKE_IMAGENET = "make-imagenet"

_OVERVIEW = f"""\
usage: lockstep data {_MAKE_IMAGENET} DIR [options]

  {_MAKE_IMAGENET}   draw a small ImageFolder (train/ and val/) for `lockstep train imagenet`

`lockstep data {_MAKE_IMAGENET} --help` shows its options
"""

_DESCRIPTION = """\
Draw a small, learnable ImageFolder: DIR/train and DIR/val, a folder for each class, JPEGs of shapes. A seed draws
the same images everywhere.
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
        raise LaunchError(f"there is no {name!r}{suggest(name, [_MAKE_IMAGENET])}; there is: {_MAKE_IMAGENET}")
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
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write; must be new or empty")
    for option, text in (
        ("--classes", f"shapes, then colours of them (default: {default.classes})"),
        ("--images", f"to train on, of all classes together (default: {default.images})"),
        ("--val-images", "to validate with, of all classes together (default: a quarter of --images)"),
        ("--size", f"edge in pixels (default: {default.size})"),
        ("--seed", f"of what is drawn (default: {default.seed})"),
        ("--quality", f"of the JPEGs, 1 to 95 (default: {default.quality})"),
    ):
        least = 0 if option == "--seed" else 1
        parser.add_argument(option, type=whole_number(least), metavar="N", help=text)
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    what = ShapesFolder(**given)
    try:
        num_train, num_val = write_shapes(what)
    except InputError as mistake:
        raise LaunchError(str(mistake)) from mistake
    print(f"{what.folder}: {num_train:,} images to train on, {num_val:,} to validate with, in {what.classes} classes")
    return 0
