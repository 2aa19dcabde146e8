"""How many rows the inputs of a model may have.

[Note: telling sizes] Where no loader of Lockstep says what a batch is, ranks compare the sizes of their inputs, and
ranks with different sizes do not go on. Not every size is one of samples: an image model of ultralytics takes a
dictionary with the boxes of all images in one tensor, of which each rank has its own number. So only those are compared
that samples come in as a rule: of the first tensor, of the tensors with the most dimensions, and lengths of lists.
*Rejected:* one size that all ranks share: a tensor that is the same on every rank, such as a list of classes, would
hide that the batches differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from lockstep.comm.wording import describe_tensor
from lockstep.tree import tensors_in

__all__ = ["Sizes", "show_inputs", "sizes_of"]


class Sizes(NamedTuple):
    """What may be the number of rows.

    Attributes:
        all: first sizes of tensors, and lengths of lists of anything else.
        telling: those of them that ranks compare; see [Note: telling sizes].
    """

    all: frozenset[int]
    telling: frozenset[int]

    def in_words(self) -> str:
        """Such as `4 or 8`; `no` where there is none."""
        return " or ".join(map(str, sorted(self.telling))) or "no"


def sizes_of(inputs: Any) -> Sizes:
    """Sizes of positional and keyword arguments of a model. Local."""
    tensors, lengths = [], set()
    for value in _values_of(inputs):
        if isinstance(value, (list, tuple)) and value and not isinstance(value[0], torch.Tensor):
            lengths.add(len(value))
            continue
        if isinstance(value, list):
            lengths.add(len(value))  # of samples, such as the images of detection models; or of inputs
        tensors += [each for each in tensors_in(value) if each.dim() > 0 and not isinstance(each, torch.nn.Parameter)]
    most = max((each.dim() for each in tensors), default=0)
    telling = [each for number, each in enumerate(tensors) if number == 0 or each.dim() == most]
    return Sizes(
        frozenset(lengths.union(int(each.size(0)) for each in tensors)),
        frozenset(lengths.union(int(each.size(0)) for each in telling)),
    )


def show_inputs(inputs: Any) -> str:
    """The first tensors of the inputs in words, for an error."""
    return ", ".join(describe_tensor(tensor) for tensor in tensors_in(inputs)[:4]) or "no tensor"


def _values_of(inputs: Any) -> Iterator[Any]:
    args, kwargs = inputs
    for value in (*args, *kwargs.values()):
        if isinstance(value, tuple) and value and isinstance(value[0], int | float | None):
            continue  # a shape, or numbers of heads; samples come in lists
        yield value
