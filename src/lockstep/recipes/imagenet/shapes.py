"""Generates a small ImageFolder of shapes, so that the ImageNet program can be run without ImageNet.

    DIR/train/000-disk/0000.jpg      class folders, real JPEGs
    DIR/val/000-disk/0000.jpg        other images of the same classes

A class is a shape; from the eleventh class on, a shape in one colour; from the 101st, on a background of one colour.
Position, size, rotation, other colours and noise are random in each image, so a network has to look at the shape. Every
image is a function of (seed, part, class, number): adding images or classes does not change the others.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageDraw

from lockstep.errors import InputError

__all__ = ["MAX_CLASSES", "ShapesFolder", "class_names", "draw_shape", "write_shapes"]

_Point: TypeAlias = tuple[float, float]
_Polygons: TypeAlias = list[list[_Point]]

_DETAIL = 3  # supersampling factor, for smooth edges
_SHARE_OF_VAL = 4  # training images per validation image


def _regular(corners: int, turn: float = 0.0) -> _Polygons:
    """A regular polygon in the unit circle."""
    angles = [turn + 2 * math.pi * corner / corners for corner in range(corners)]
    return [[(math.cos(angle), math.sin(angle)) for angle in angles]]


def _star(spikes: int, inner: float) -> _Polygons:
    radii = [1.0 if corner % 2 == 0 else inner for corner in range(2 * spikes)]
    angles = [math.pi * corner / spikes for corner in range(2 * spikes)]
    return [[(radius * math.cos(angle), radius * math.sin(angle)) for radius, angle in zip(radii, angles, strict=True)]]


def _box(left: float, top: float, right: float, bottom: float) -> list[_Point]:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _ring() -> _Polygons:
    (outer,) = _regular(40)
    return [[*outer, outer[0], *[(0.55 * x, 0.55 * y) for x, y in [outer[0], *reversed(outer)]]]]


# Name -> its filled polygons in the unit circle, in the order of the classes.
_SHAPES: dict[str, Callable[[], _Polygons]] = {
    "disk": lambda: _regular(40),
    "square": lambda: _regular(4, math.pi / 4),
    "triangle": lambda: _regular(3, -math.pi / 2),
    "ring": _ring,
    "cross": lambda: [_box(-1, -0.28, 1, 0.28), _box(-0.28, -1, 0.28, 1)],
    "star": lambda: _star(5, 0.4),
    "stripes": lambda: [_box(-0.9, top, 0.9, top + 0.3) for top in (-0.9, -0.15, 0.6)],
    "dots": lambda: [[(0.55 * a + 0.3 * x, 0.55 * b + 0.3 * y) for x, y in _regular(20)[0]]
                     for a in (-1, 1) for b in (-1, 1)],
    "crescent": lambda: [[(math.cos(a), math.sin(a)) for a in np.linspace(-1.9, 1.9, 30).tolist()]
                         + [(-0.45 + 0.95 * math.cos(a), 0.85 * math.sin(a)) for a in np.linspace(1.7, -1.7, 30)]],
    "arrow": lambda: [_box(-1, -0.2, 0.1, 0.2), [(0.1, -0.65), (1, 0), (0.1, 0.65)]],
}  # fmt: skip
_COLOURS = 10

MAX_CLASSES = len(_SHAPES) * _COLOURS * _COLOURS


@dataclass(frozen=True)
class ShapesFolder:
    """What to generate.

    Attributes:
        folder: folder to write to; must be new or empty.
        classes: number of classes, 2 … `MAX_CLASSES`.
        images: number of training images over all classes, distributed evenly.
        val_images: number of validation images over all classes; None for `images` / 4, at least one per class.
        size: edge length in pixels.
        seed: random seed.
        quality: JPEG quality, 1 … 95.
    """

    folder: Path
    classes: int = 10
    images: int = 400
    val_images: int | None = None
    size: int = 64
    seed: int = 0
    quality: int = 90

    def check(self) -> None:
        """Check the values.

        Raises:
            InputError: names the option, its value and its range.
        """
        limits = {
            "--classes": (self.classes, 2, MAX_CLASSES),
            "--size": (self.size, 8, 4096),
            "--quality": (self.quality, 1, 95),
            "--images": (self.images, self.classes, None),
            "--val-images": (self.num_val_images, self.classes, None),
        }
        for option, (value, least, most) in limits.items():
            if value < least or (most is not None and value > most):
                reason = ": every class needs an image" if "images" in option else ""
                upper = "or more" if most is None else f"to {most}"
                raise InputError(f"{option} is {value}; expected {least} {upper}{reason}")

    @property
    def num_val_images(self) -> int:
        """Number of validation images over all classes."""
        return max(self.images // _SHARE_OF_VAL, self.classes) if self.val_images is None else self.val_images


def class_names(count: int) -> list[str]:
    """Folder names of the first `count` classes, in order.

    >>> class_names(12)[0], class_names(12)[11]
    ('000-disk', '011-square-red')
    """
    colours = ("blue", "red", "green", "yellow", "purple", "cyan", "orange", "pink", "lime", "teal")
    shapes = list(_SHAPES)
    names = []
    for number in range(count):
        words = [f"{number:03}", shapes[number % len(shapes)]]
        if number >= len(shapes):
            words.append(colours[number // len(shapes) % _COLOURS])
        if number >= len(shapes) * _COLOURS:
            words.append(f"on-{colours[number // (len(shapes) * _COLOURS)]}")
        names.append("-".join(words))
    return names


def draw_shape(number: int, size: int, random_: random.Random) -> Image.Image:
    """Draw an image of class `number`.

    Args:
        number: number of the class, 0 … `MAX_CLASSES` - 1.
        size: edge length in pixels.
        random_: random number generator for everything but the class.
    """
    kinds = len(_SHAPES)
    hue = number // kinds % _COLOURS if number >= kinds else random_.randrange(_COLOURS)
    many = number >= kinds * _COLOURS
    back_hue = number // (kinds * _COLOURS) if many else random_.randrange(_COLOURS)
    edge = size * _DETAIL
    image = Image.new("RGB", (edge, edge), _colour(back_hue, random_, light=False))
    draw = ImageDraw.Draw(image)
    radius = edge * random_.uniform(0.24, 0.38)
    centre = [random_.uniform(0.42, 0.58) * edge for _ in range(2)]
    turn = random_.uniform(-0.3, 0.3)
    colour = _colour(hue, random_, light=True)
    for polygon in _SHAPES[list(_SHAPES)[number % kinds]]():
        draw.polygon([_placed(point, turn, radius, centre) for point in polygon], fill=colour)
    small = np.asarray(image.resize((size, size), Image.Resampling.BOX), dtype=np.float32)
    noise = np.random.default_rng(random_.getrandbits(64)).normal(0, 8, small.shape)
    return Image.fromarray(np.clip(small + noise, 0, 255).astype(np.uint8))


def write_shapes(what: ShapesFolder) -> tuple[int, int]:
    """Write the folder. It appears once all images are written, or not at all.

    Returns:
        Number of training images, and of validation images.

    Raises:
        InputError: `what` has invalid values, or its folder is not empty or cannot be created.
    """
    what.check()
    target = what.folder
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InputError(f"{target} exists and is not empty: choose a new folder, or delete it first")
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise InputError(f"cannot create {target}: {error.strerror}; choose another folder") from error
    try:
        unfinished.chmod(0o755)
        counts = [_write_part(unfinished, what, part, n) for part, n in _parts(what)]
        os.replace(unfinished, target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return counts[0], counts[1]


def _parts(what: ShapesFolder) -> Iterator[tuple[str, int]]:
    yield "train", what.images
    yield "val", what.num_val_images


def _write_part(folder: Path, what: ShapesFolder, part: str, count: int) -> int:
    for number, name in enumerate(class_names(what.classes)):
        (folder / part / name).mkdir(parents=True)
        for index in range(count // what.classes + (number < count % what.classes)):
            image = draw_shape(number, what.size, random.Random(f"{what.seed}/{part}/{number}/{index}"))
            image.save(folder / part / name / f"{index:04}.jpg", quality=what.quality)
    return count


def _placed(point: _Point, turn: float, radius: float, centre: list[float]) -> _Point:
    x, y = point
    cos, sin = math.cos(turn), math.sin(turn)
    return centre[0] + radius * (x * cos - y * sin), centre[1] + radius * (x * sin + y * cos)


def _colour(hue: int, random_: random.Random, *, light: bool) -> str:
    """A colour near one of ten hues: light for shapes, dark for backgrounds."""
    degrees = (36 * hue + random_.uniform(-8, 8)) % 360
    lightness = random_.uniform(55, 75) if light else random_.uniform(10, 28)
    return f"hsl({degrees:.0f},{random_.uniform(50, 90):.0f}%,{lightness:.0f}%)"
