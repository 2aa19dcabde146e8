"""Which samples, in which order, on which rank: pure functions of a few integers.

One epoch is an order of `num_samples` indices. A global batch is a run of `batch_size`
consecutive positions in it, and a rank's share is a run of the batch:

    order      7 2 9 4 | 0 8 1 6 | 5 3          10 samples, batch_size 4
    rank 0     7 2     | 0 8     | 5            world_size 2
    rank 1         9 4 |     1 6 |   3

So putting the ranks' shares side by side gives back the batch, and putting the batches after
each other gives back the order, at any number of ranks. The order itself is an array of integers (a
`range` when nothing is shuffled, or computed where it is asked for), never a list: Python integers exist for
one batch at a time.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lockstep.batch import BatchShare, Division, filler_rows, share_bounds
from lockstep.data.feistel import ComputedOrder
from lockstep.data.seeding import derive_seed, make_generator, preserve_global_rngs, seed_global_rngs
from lockstep.errors import DataError

__all__ = [
    "Fetch",
    "Order",
    "Plan",
    "Schedule",
    "computed_order",
    "draw_order",
    "num_earlier",
    "seed_keys",
    "shuffled_order",
]

Stored: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.int32]
Order: TypeAlias = Stored | range | ComputedOrder  # [num_samples]; numpy slices small runs faster than torch

_STORED_ANYWAY = 1 << 16  # samples; 256 KiB
_INDEX_BITS = 40
# torch draws 32 bits for each position up to here, whatever the dtype, and 64 beyond.
_INT32_NUMEL = 2**32 // 20


@dataclass(frozen=True)
class Plan:
    """Where the global batches of one epoch begin and end.

    Attributes:
        num_samples: samples in the epoch, at least 1.
        batch_size: samples in a global batch, at least 1.
        drop_last: leave out a last batch smaller than `batch_size`.
        start: samples consumed before the first batch; more than 0 when an epoch is resumed.
    """

    num_samples: int
    batch_size: int
    drop_last: bool = False
    start: int = 0

    def __len__(self) -> int:
        """Number of global batches from `start` on."""
        rest = max(self.num_samples - self.start, 0)
        return rest // self.batch_size if self.drop_last else -(-rest // self.batch_size)

    def bounds(self, number: int) -> tuple[int, int]:
        """Begin and end, as positions in the order, of batch `number` (0 is the one at `start`)."""
        begin = self.start + number * self.batch_size
        return begin, min(begin + self.batch_size, self.num_samples)


def shuffled_order(num_samples: int, seed: int, epoch: int) -> Stored:
    """The order of one epoch: a permutation that depends on its arguments only.

    Returns:
        [num_samples]; int32 where that is enough, which takes half the memory and is the same permutation.
    """
    dtype = torch.int32 if num_samples <= _INT32_NUMEL else torch.int64
    permutation: Stored = torch.randperm(
        num_samples, generator=make_generator(b"shuffle", seed, epoch), dtype=dtype, device="cpu"
    ).numpy()
    return permutation


def computed_order(num_samples: int, seed: int, epoch: int) -> Stored | ComputedOrder:
    """Another permutation that depends on its arguments only, and takes no memory to speak of.

    Up to 65,536 samples it is that of `shuffled_order`.
    """
    if num_samples <= _STORED_ANYWAY:
        return shuffled_order(num_samples, seed, epoch)
    return ComputedOrder(num_samples, seed, epoch)


def _drawn(sampler: Any) -> npt.NDArray[np.int64]:
    """What it yields, up to one more than its length: it may be endless, or change its length as it is walked."""
    indices = map(operator.index, sampler)
    parts: list[npt.NDArray[np.int64]] = []
    while (room := len(sampler) + 1 - sum(map(len, parts))) > 0:
        parts.append(np.fromiter(itertools.islice(indices, room), dtype=np.int64))
        if len(parts[-1]) < room:
            break
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def draw_order(sampler: Any, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Run a user's sampler once, from the same random state on every rank.

    The process-wide generators are seeded with (seed, epoch) while it runs and put back
    afterwards, so a `RandomSampler` or `WeightedRandomSampler` without a generator of its own
    draws alike on all ranks.

    Returns:
        int64 [len(sampler)].

    Raises:
        DataError: it yields something else than integers, or not as many as its length says; it may be endless.
    """
    with preserve_global_rngs():
        seed_global_rngs(derive_seed(b"sampler", seed, epoch))
        try:
            indices = _drawn(sampler)
        except (TypeError, OverflowError) as error:
            raise DataError(
                f"sampler {type(sampler).__name__} yields something that is no index ({error}); expected an "
                "integer per sample. A sampler that yields lists is a batch_sampler: pass it as that"
            ) from error
    if len(indices) != len(sampler):
        number = len(indices) if len(indices) < len(sampler) else "more"
        raise DataError(
            f"sampler {type(sampler).__name__} yielded {number} indices in epoch {epoch}, but its length is "
            f"{len(sampler)}, and the number of batches follows from that: fix its __len__. If it is endless, for "
            "a loop without epochs, drop it and pass shuffle=True: each new iteration of the loader is the next epoch"
        )
    return indices


def seed_keys(indices: npt.NDArray[np.int64], earlier: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
    """What takes the place of a sampler's indices where samples are seeded, int64 [num_samples].

    The index, and of one that comes again, such as those of a rare class, the number of times that it came before,
    which is counted where it is not given: so that each time another augmentation is drawn.

    >>> seed_keys(np.array([7, 2, 7])).tolist() == [7, 2, 7 ^ 1 << 40]
    True
    """
    return indices ^ ((num_earlier(indices) if earlier is None else earlier) << _INDEX_BITS)


def num_earlier(order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How often each index has come before in the order, int64 [num_samples]; of which there is one at least.

    >>> num_earlier(np.array([7, 2, 7])).tolist()
    [0, 0, 1]
    """
    by_index = np.argsort(order, kind="stable")
    starts = np.flatnonzero(np.diff(order[by_index], prepend=order[by_index[0]] - 1))
    earlier = np.zeros_like(order)
    if len(starts) < len(order):
        earlier[by_index] = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    return earlier


class Fetch(NamedTuple):
    """What is asked of the dataset for one batch of one rank; travels to the worker processes.

    Attributes:
        seed: the loader's.
        epoch: number of the epoch; with seed and key it seeds each sample.
        indices: what to fetch, in order; never empty.
        keys: of the samples; see `seed_keys`.
    """

    seed: int
    epoch: int
    indices: list[int]
    keys: list[int]


@dataclass(frozen=True)
class Schedule:
    """The batches of one rank in one epoch.

    Iterating gives a `Fetch` per batch. Batch `number` of it is always global batch `number` of
    the plan: when evaluating, only the last batches of a rank can be missing, because a rank
    without a share of a full batch has no share of a smaller one.

    Attributes:
        order: the indices of the epoch, the same on every rank.
        plan: the global batches.
        seed: the loader's.
        epoch: number of the epoch.
        rank: this rank.
        world_size: number of ranks.
        evaluation: leave out batches of which this rank holds nothing, instead of yielding a filler.
        source: of the loader; its shares keep it alive.
        fingerprint: a number for the samples and their order; see `fingerprints.py`.
        keys: what seeds the samples, in the same order; None for the indices.
        mark: of the order, see `iteration.EpochProgress`.
    """

    order: Order
    plan: Plan
    seed: int
    epoch: int
    rank: int
    world_size: int
    evaluation: bool = False
    source: object = None
    fingerprint: int = 0
    keys: npt.NDArray[np.int64] | None = None
    mark: int = 0

    def __len__(self) -> int:
        """Number of batches that this rank yields."""
        total = len(self.plan)
        if not self.evaluation or total == 0 or self.share(total - 1).local_samples > 0:
            return total
        return total - 1 if self.share(0).local_samples > 0 else 0

    def __iter__(self) -> Iterator[Fetch]:
        for number in range(len(self)):
            first, last = self.plan.bounds(number)
            begin, end = share_bounds(last - first, self.rank, self.world_size)
            # A filler: the step needs a forward and backward pass on every rank. Its weight is 0.
            copies = 1 if begin < end else filler_rows(self.plan.batch_size, self.rank, self.world_size)
            if begin == end:
                begin, end = 0, 1
            indices = _picked(self.order, first + begin, first + end) * copies
            keys = indices if self.keys is None else _picked(self.keys, first + begin, first + end) * copies
            yield Fetch(self.seed, self.epoch, indices, keys)

    def share(self, number: int) -> BatchShare:
        """What this rank holds of batch `number`."""
        first, last = self.plan.bounds(number)
        is_full = last - first == self.plan.batch_size
        share = self._full_share if is_full else self._share_of(last - first)
        # Named by its position in the epoch: a resumed epoch counts its batches anew.
        return share.named(f"samples {first} to {last - 1} of epoch {self.epoch}")

    @cached_property
    def _full_share(self) -> BatchShare:
        return self._share_of(self.plan.batch_size)

    def _share_of(self, size: int) -> BatchShare:
        begin, end = share_bounds(size, self.rank, self.world_size)
        rows = end - begin or filler_rows(self.plan.batch_size, self.rank, self.world_size)
        return BatchShare(end - begin, size, self.world_size, "", self.evaluation, rows, self.source, self.fingerprint)

    def divisions(self) -> set[Division]:
        """How the batches are split; those of an evaluation are not for training, and not told."""
        numbers = {0, len(self.plan) - 1} if len(self.plan) and not self.evaluation else set()
        sizes = {last - first for first, last in map(self.plan.bounds, numbers)}
        return {Division(size, self.plan.batch_size, self.world_size) for size in sizes}

    def take(self, number: int) -> tuple[BatchShare, int, int]:
        """Batch `number` is yielded now: the share, the samples of the epoch used up by then, and the mark. Local."""
        return self.share(number), self.plan.bounds(number)[1], self.mark


def _picked(order: Order, begin: int, end: int) -> list[int]:
    picked = order[begin:end]
    return list(picked) if isinstance(picked, range) else picked.tolist()
