"""Decides whether different shapes match: they do if they have equally many elements and one of them is flat.

A program may broadcast a matrix from one rank into a flat tensor on the others, and view that as a matrix afterwards.
gloo and NCCL only compare the number of elements, in every collective. A matrix against its transpose stays a mismatch.

[Note: sides] Two tensors with as many elements, one flat and one not, may also be two different tensors that the ranks
reduce in a different order. If all ranks make the same calls in any order, a rank that passed the flat one while
another passed the matrix will pass the matrix later, while the other passes the flat one. So it is a mismatch if two
ranks change sides; it is detected in the later call, because the earlier one looks like a correct program. Calls that
differ in operation, dtype, root or number of elements are tracked separately.

All ranks see the same texts of every collective, and reach the same verdict.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence
from typing import Any

from lockstep.comm.wording import SHAPE, without_ones

__all__ = ["FlatShapes", "Shapes"]

# Operations described by `descriptions.py`. In other texts, such as an engine's, shapes mean more than their elements.
_CALL = re.compile(r"(?:all_gather|all_reduce|broadcast|gather|reduce|reduce_scatter|scatter)\((?!sparse )")

_MAX_ACCEPTED = 4096

# The ranks with a flat tensor in one argument of a call, and those with another shape.
_Sides = tuple[frozenset[int], frozenset[int]]


class Shapes(enum.Enum):
    """How the texts of a collective differ between ranks."""

    DIFFERENT = enum.auto()  # in more than shapes, or in the number of elements
    AGREE = enum.auto()
    SWAPPED = enum.auto()  # as many elements, but ranks have changed sides since an earlier call


class FlatShapes:
    """Remembers which ranks of one group passed flat tensors where others passed tensors of another shape."""

    def __init__(self) -> None:
        self._accepted: dict[tuple[int, ...], None] = {}
        self._sides: dict[tuple[str, int], dict[_Sides, None]] = {}

    def knows(self, fingerprints: tuple[int, ...]) -> bool:
        """Whether these fingerprints, one for each rank, have been found to match before."""
        return fingerprints in self._accepted

    def judge(self, fingerprints: tuple[int, ...], texts: Sequence[str]) -> Shapes:
        """Judge a collective in which the ranks' fingerprints differ.

        Args:
            fingerprints: of each rank's description and line.
            texts: the full description that each rank wrote.
        """
        places = _sides_of(texts)
        if places is None:
            return Shapes.DIFFERENT
        for place, sides in places.items():
            if any(_are_swapped(sides, earlier) for earlier in self._sides.get(place, ())):
                return Shapes.SWAPPED
        for place, sides in places.items():
            self._sides.setdefault(place, {})[sides] = None
        self._accepted[fingerprints] = None
        _forget_oldest(self._accepted)
        _forget_oldest(self._sides)
        return Shapes.AGREE


def _forget_oldest(memory: dict[Any, Any]) -> None:
    while len(memory) > _MAX_ACCEPTED:
        del memory[next(iter(memory))]


def _sides_of(texts: Sequence[str]) -> dict[tuple[str, int], _Sides] | None:
    """The two sides of each tensor whose shapes differ, by the text without shapes and the tensor's position in it.

    None if the texts differ in more than shapes, or if some shapes do not match.
    """
    texts = [without_ones(text) for text in texts]
    frames = {SHAPE.sub("[]", text) for text in texts}
    if len(frames) > 1 or not all(map(_CALL.match, frames)):
        return None
    frame = frames.pop()
    found: dict[tuple[str, int], _Sides] = {}
    columns = zip(*([_sizes(shape) for shape in SHAPE.findall(text)] for text in texts), strict=True)
    for place, shapes in enumerate(columns):
        numels = {math.prod(shape) for shape in shapes}
        if len(numels) > 1 or len({shape for shape in shapes if len(shape) > 1}) > 1:
            return None
        flat = frozenset(rank for rank, shape in enumerate(shapes) if len(shape) <= 1)
        if 0 < len(flat) < len(shapes):
            found[f"{frame} {numels.pop()}", place] = flat, frozenset(range(len(shapes))) - flat
    return found


def _sizes(shape: str) -> tuple[int, ...]:
    return tuple(int(size) for size in shape.split(", ") if size)


def _are_swapped(sides: _Sides, earlier: _Sides) -> bool:
    """Whether one rank has changed from the flat side to the other, and another one in the opposite direction."""
    return bool(sides[0] & earlier[1] and sides[1] & earlier[0])
