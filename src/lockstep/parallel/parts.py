"""Counts the slices of a batch that go through a model one by one; raises if they cannot add up to the batch.

[Note: parts of a batch] A slice of a batch (micro-batches cut from it) is weighted as the whole batch is: with a loss
divided by the number of slices that gives the mean over the batch, provided that all slices have one size and
that together they are the batch. The first is checked at once, the second when other batches come. Slices of each
tensor of a batch count for themselves (chosen and rejected answers), and each may come several times, all equally
often. *Rejected:*
weighting a slice by its own size: what one process would have had in its slice is unknown here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch

from lockstep.batch import BatchShare, Tag
from lockstep.errors import InputError

__all__ = ["Parts", "Slice", "describe_share", "slice_of"]


def describe_share(share: BatchShare) -> str:
    """`batch 3 of epoch 0: 128 samples`: the form in which errors name a batch."""
    return f"{share.name}: {share.global_samples} samples" if share.name else f"{share.global_samples} samples"


class Slice(NamedTuple):
    """Some of the samples of a batch, as a tensor shows them.

    Attributes:
        of: the batch, in words.
        rows: how many samples.
        of_rows: how many samples of the batch this rank holds.
        memory: of the batch, its address.
        offset: of the slice's first element in that memory.
    """

    of: str
    rows: int
    of_rows: int
    memory: int
    offset: int


def slice_of(tensor: torch.Tensor, tag: Tag) -> Slice | None:
    """What this view of a tensor that came with a batch takes of it; None where it takes all. Local."""
    rows = _rows_of(tensor, tag)
    if rows is None or rows == tag.rows:
        return None
    memory = tensor.untyped_storage().data_ptr()
    return Slice(describe_share(tag.share), rows, tag.rows, memory, int(tensor.storage_offset()))


class Parts:
    """Batches of which slices went through the model. See [Note: parts of a batch]."""

    # Two loaders may take turns; a third batch shows that the slices of the first were all there will be.
    _MAX_OPEN = 2

    def __init__(self) -> None:
        self._open: dict[str, dict[int, _Part]] = {}  # by batch, and by memory

    def add(self, piece: Slice) -> int:
        """A forward pass takes that slice. Returns into how many parts its batch is cut.

        Raises:
            InputError: the parts cannot add up to the mean over the batch.
        """
        rows, of_rows = piece.rows, piece.of_rows
        parts = self._open.setdefault(piece.of, {})
        part = parts.setdefault(piece.memory, _Part(rows, of_rows))
        if not rows or of_rows % rows or rows != part.rows:
            raise InputError(
                f"this forward pass takes {rows} of the {of_rows} samples that this rank holds of {piece.of}. Parts of "
                "a batch must have one size on every rank, and be the whole of it. For micro-batches let the loader "
                "make them (a smaller batch_size, and model.no_sync()), or say how many samples the loss is the mean "
                "over: `with model.samples(n):`"
            )
        part.passes[piece.offset] += 1
        if part.is_whole and part.is_level:
            del parts[piece.memory]
        if not parts:
            del self._open[piece.of]
        elif len(self._open) > self._MAX_OPEN:
            self._refuse_first()
        return of_rows // rows

    def _refuse_first(self) -> NoReturn:
        what, parts = next(iter(self._open.items()))
        part = next(iter(parts.values()))  # not whole, or not level
        self._open.clear()
        if part.is_whole:
            raise InputError(
                f"the model saw some slices of {what} more often than others: which samples count more depends on "
                "the number of ranks. Call it on the whole batch as often as on a part, or say how many samples "
                "the loss is the mean over: `with model.samples(n):`"
            )
        raise InputError(
            f"only {part.num_rows} of the {part.of_rows} samples that this rank holds of {what} went through the "
            "model, cut from the batch: which samples of the global batch that leaves out depends on the number of "
            "ranks. Leave samples out in the dataset or the sampler, or say how many samples the loss is the mean "
            "over: `with model.samples(n):`"
        )


@dataclass(frozen=True)
class _Part:
    """The slices that came of one tensor of a batch.

    Attributes:
        passes: how often each came, by its offset.
    """

    rows: int
    of_rows: int
    passes: Counter[int] = field(default_factory=Counter)

    @property
    def num_rows(self) -> int:
        return len(self.passes) * self.rows

    @property
    def is_whole(self) -> bool:
        return self.num_rows == self.of_rows

    @property
    def is_level(self) -> bool:
        """Whether all came equally often."""
        return len(set(self.passes.values())) == 1


def _rows_of(tensor: torch.Tensor, tag: Tag) -> int | None:
    """How many rows of the tensor that was yielded this view of it has; None where that cannot be told, or is all."""
    if tensor.numel() == tag.numel or tag.rows < 2 or tag.rows != (tag.share.local_samples or tag.rows):
        return None
    strides = list(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, size in strides:
        if stride == tag.stride:
            return size
    for stride, size in strides:  # every second row
        if stride > tag.stride and stride % tag.stride == 0:
            return size
    return 1 if tensor.numel() * tag.rows == tag.numel else None
