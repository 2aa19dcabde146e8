"""A share: how many samples of one global batch a rank holds; a rank that holds none gets a filler."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BatchShare", "share_bounds"]


@dataclass(frozen=True)
class BatchShare:
    """How many samples of one global batch this rank holds.

    Attributes:
        local_samples: this rank's number of samples; 0 if its batch is a filler.
        global_samples: number of samples over all ranks; at least 1.
        world_size: number of ranks that share the batch.
        name: identifies the batch, the same on all ranks, such as "batch 3 of epoch 0"; "" if unknown.
        evaluation: whether the loader has `evaluation=True`, so that ranks may get different numbers of batches.
        rows: number of samples that this rank was given: its own, or the filler's.
        source: kept alive with the batch; see `plans.LoaderToken`.
        fingerprint: a number that identifies the samples and their order, the same on all ranks; 0 if unknown.
    """

    local_samples: int
    global_samples: int
    world_size: int
    name: str = field(default="", compare=False)
    evaluation: bool = field(default=False, compare=False)
    rows: int = field(default=0, compare=False)
    source: object = field(default=None, compare=False, repr=False)
    fingerprint: int = field(default=0, compare=False, repr=False)

    @property
    def weight(self) -> float:
        """This rank's share relative to an even one: 1.0 when the batch divides evenly.

        The mean over ranks of `weight * mean over the rank's samples` is the mean over the global batch.
        """
        return self.local_samples * self.world_size / self.global_samples

    def remembered(self) -> BatchShare:
        """A copy to keep after the batch: it does not keep the loader in use."""
        return self if self.source is None else self._with(source=None)

    def named(self, name: str, fingerprint: int) -> BatchShare:
        """A copy for another batch."""
        return self._with(name=name, fingerprint=fingerprint)

    def _with(self, **changes: object) -> BatchShare:
        twin = object.__new__(BatchShare)  # `replace` takes ten times as long, and this runs in every step
        twin.__dict__.update(self.__dict__, **changes)
        return twin


def share_bounds(num_samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """The part of a batch that one rank holds: contiguous; sizes differ by at most one, larger first.

    Args:
        num_samples: samples in the global batch.
        rank: 0 … world_size-1.
        world_size: number of ranks.

    Returns:
        Begin and end, counted from the batch's first sample; equal if the rank gets none.

    >>> [share_bounds(5, rank, 3) for rank in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    """
    size, larger_shares = divmod(num_samples, world_size)
    begin = rank * size + min(rank, larger_shares)
    return begin, begin + size + (rank < larger_shares)
