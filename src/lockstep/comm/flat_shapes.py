"""Decides whether ranks with different shapes came for the same: equally many elements, and flat where they differ.

A program may broadcast a matrix from one rank into a flat tensor of the others, and view that as a matrix afterwards.
gloo and NCCL go by the number of elements, in every collective. A matrix against its transpose stays a mismatch.

[Note: sides] Two tensors of as many elements, one flat and one not, may also be two different ones, which the ranks
reduce in different order. Where all ranks make the same calls, in whatever order, a rank that came with the flat one
while another had the matrix comes with the matrix later, while the other has the flat one. So it is a mismatch where
two ranks change sides: in the later call, for the earlier one looks like a program that is right. Calls that differ in
operation, dtype, root or number of elements are told apart.

All ranks see the same texts of every collective, and come to the same judgement.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence
from typing import Any

from lockstep.comm.wording import SHAPE, without_ones

__all__ = ["FlatShapes", "Shapes"]

# Those that `descriptions.py` describes. Other texts with shapes, such as an engine's, stand for more than elements.
_CALL = re.compile(r"(?:all_gather|all_reduce|broadcast|gather|reduce|reduce_scatter|scatter)\((?!sparse )")

_MAX_ACCEPTED = 4096

# The ranks with a flat tensor in one place of a call, and those with another shape.
_Sides = tuple[frozenset[int], frozenset[int]]


class Shapes(enum.Enum):
    """What to make of a collective to which the ranks came with different texts."""

    DIFFERENT = enum.auto()  # in more than shapes, or in the number of elements
    AGREE = enum.auto()
    SWAPPED = enum.auto()  # as many elements, but which ranks are flat has changed sides


class FlatShapes:
    """Remembers which ranks of one group came with flat tensors, where others came with tensors of another shape."""

    def __init__(self) -> None:
        self._accepted: dict[tuple[int, ...], None] = {}
        self._sides: dict[tuple[str, int], dict[_Sides, None]] = {}

    def knows(self, fingerprints: tuple[int, ...]) -> bool:
        """Whether these fingerprints, one for each rank, have been found to agree before."""
        return fingerprints in self._accepted

    def judge(self, fingerprints: tuple[int, ...], texts: Sequence[str]) -> Shapes:
        """Judge a collective for which not all ranks came with the same fingerprint.

        Args:
            fingerprints: that of each rank's description and line.
            texts: the description that each rank wrote, whole.
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
    """For each tensor whose shapes differ, by the text without shapes and its place there: who is on which side.

    None if the texts differ in more than shapes, or some shapes do not fit each other.
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
    """Whether one rank has changed from the flat side to the other, and one the other way."""
    return bool(sides[0] & earlier[1] and sides[1] & earlier[0])
