"""Which samples, in which order, on which rank: pure functions of a few integers.

One epoch is an order of `num_samples` indices. A global batch is a run of `batch_size`
consecutive positions in it, and a rank's share is a run of the batch:

    order      7 2 9 4 | 0 8 1 6 | 5 3          10 samples, batch_size 4
    rank 0     7 2     | 0 8     | 5            world_size 2
    rank 1         9 4 |     1 6 |   3

So concatenating the ranks' shares gives the batch, and concatenating the batches gives the order, at any number of
ranks. The order itself is an array of integers (or a `range` if nothing is shuffled, or computed on demand), never a
list: Python integers exist for one batch at a time.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from lockstep import batch
from lockstep.batch.plans import Division, LoaderToken
from lockstep.batch.share import BatchShare, share_bounds
from lockstep.data.feistel import ComputedOrder
from lockstep.data.seeding import derive_seed, make_generator, preserve_global_rngs, seed_global_rngs
from lockstep.errors import DataError

__all__ = [
    "Fetch",
    "GlobalBatch",
    "Order",
    "OrderedBatches",
    "Plan",
    "RankBatches",
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
# Up to here torch draws 32 bits for each position, for every dtype, and 64 beyond.
_INT32_NUMEL = 2**32 // 20


@dataclass(frozen=True)
class Plan:
    """Where the global batches of one epoch begin and end.

    Attributes:
        num_samples: samples in the epoch, at least 1.
        batch_size: samples in a global batch, at least 1.
        drop_last: whether to leave out a last batch smaller than `batch_size`.
        start: samples consumed before the first batch; more than 0 if an epoch is resumed.
    """

    num_samples: int
    batch_size: int
    drop_last: bool = False
    start: int = 0

    def __len__(self) -> int:
        """Number of global batches from `start` on."""
        return sum(self.sizes().values())

    def sizes(self) -> dict[int, int]:
        """Number of global batches by their size."""
        full, rest = divmod(max(self.num_samples - self.start, 0), self.batch_size)
        numbers = {self.batch_size: full, rest: int(rest > 0 and not self.drop_last)}
        return {size: number for size, number in numbers.items() if number}

    def bounds(self, number: int) -> tuple[int, int]:
        """Begin and end of batch `number`, as positions in the order; batch 0 begins at `start`."""
        begin = self.start + number * self.batch_size
        return begin, min(begin + self.batch_size, self.num_samples)


def shuffled_order(num_samples: int, seed: int, epoch: int) -> Stored:
    """The order of one epoch: a permutation that depends only on the arguments.

    Returns:
        [num_samples]; the same permutation in int32, if that suffices, to halve the memory.
    """
    dtype = torch.int32 if num_samples <= _INT32_NUMEL else torch.int64
    permutation: Stored = torch.randperm(
        num_samples, generator=make_generator(b"shuffle", seed, epoch), dtype=dtype, device="cpu"
    ).numpy()
    return permutation


def computed_order(num_samples: int, seed: int, epoch: int) -> Stored | ComputedOrder:
    """Another permutation that depends only on the arguments, and takes almost no memory.

    Up to 65,536 samples it is the one of `shuffled_order`.
    """
    if num_samples <= _STORED_ANYWAY:
        return shuffled_order(num_samples, seed, epoch)
    return ComputedOrder(num_samples, seed, epoch)


def _drawn(sampler: Any) -> npt.NDArray[np.int64]:
    """The sampler's indices, at most one more than its length: it may be endless, or change length while iterated."""
    indices = map(operator.index, sampler)
    parts: list[npt.NDArray[np.int64]] = []
    while (room := len(sampler) + 1 - sum(map(len, parts))) > 0:
        parts.append(np.fromiter(itertools.islice(indices, room), dtype=np.int64))
        if len(parts[-1]) < room:
            break
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def draw_order(sampler: Any, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Run a user's sampler once, from the same random state on every rank.

    The process-wide generators are seeded with (seed, epoch) while it runs and restored afterwards, so a
    `RandomSampler` or `WeightedRandomSampler` without its own generator draws the same on all ranks.

    Returns:
        int64 [len(sampler)].

    Raises:
        DataError: it yields something other than integers, or more or fewer than its length.
    """
    with preserve_global_rngs():
        seed_global_rngs(derive_seed(b"sampler", seed, epoch))
        try:
            indices = _drawn(sampler)
        except (TypeError, OverflowError) as error:
            raise DataError(
                f"sampler {type(sampler).__name__} yields something that is not an index ({error}); expected one "
                "integer per sample. If it yields lists, pass it as batch_sampler"
            ) from error
    if len(indices) != len(sampler):
        number = len(indices) if len(indices) < len(sampler) else "more"
        raise DataError(
            f"sampler {type(sampler).__name__} yielded {number} indices in epoch {epoch}, but its length is "
            f"{len(sampler)}, which determines the number of batches. Fix its __len__. If it is endless, for a loop "
            "without epochs, drop it and pass shuffle=True: each new iteration of the loader is the next epoch"
        )
    return indices


def seed_keys(indices: npt.NDArray[np.int64], earlier: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
    """The keys that seed the samples of a sampler's order in place of their indices, int64 [num_samples].

    A key combines the index with the number of times that it came before, so that a repeated sample, such as one of a
    rare class, is augmented differently each time. These numbers are counted unless `earlier` gives them.

    >>> seed_keys(np.array([7, 2, 7])).tolist() == [7, 2, 7 ^ 1 << 40]
    True
    """
    return indices ^ ((num_earlier(indices) if earlier is None else earlier) << _INDEX_BITS)


def num_earlier(order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How often the index at each position came before it in the order, int64 [num_samples]; at least one sample.

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
    """A request for the samples of one rank's batch; sent to the worker processes.

    Attributes:
        seed: the loader's seed.
        epoch: number of the epoch; each sample is seeded by seed, epoch and its key.
        indices: indices of the samples, in order; never empty.
        keys: keys of the samples; see `seed_keys`.
    """

    seed: int
    epoch: int
    indices: list[int]
    keys: list[int]


class GlobalBatch(NamedTuple):
    """One batch of an epoch, over all ranks.

    Attributes:
        order: sample indices; the batch's begin at position `begin`.
        keys: keys of the samples at the same positions; see `seed_keys`.
        begin: position of the batch's first sample in both.
        size: number of samples in the batch; at least one.
        first: number of samples in the epoch before it.
        mark: mark of the order, or of all batches up to the end of this one; see `iteration.EpochProgress`.
    """

    order: Order | list[int]
    keys: Order | list[int]
    begin: int
    size: int
    first: int
    mark: int = 0


@dataclass(frozen=True)
class OrderedBatches:
    """The global batches of an epoch whose order is known: consecutive runs of it.

    Attributes:
        order: the indices of the epoch, the same on every rank.
        plan: where the batches begin and end.
        keys: keys of the samples, in the same order; None if these are the indices.
        mark: mark of the order.
    """

    order: Order
    plan: Plan
    keys: npt.NDArray[np.int64] | None = None
    mark: int = 0

    def __iter__(self) -> Iterator[GlobalBatch]:
        keys = self.order if self.keys is None else self.keys
        for number in range(len(self.plan)):
            first, last = self.plan.bounds(number)
            yield GlobalBatch(self.order, keys, first, last - first, first, self.mark)


@dataclass(eq=False)
class RankBatches:
    """The batches of one rank in one epoch: its parts of the global batches. Iterating yields a `Fetch` per batch.

    Attributes:
        batches: the global batches, from where the epoch begins or is resumed.
        sizes: number of global batches by size; None if they are made on the fly.
        batch_size: samples in a full global batch. If sizes vary, the number of ranks: a filler then has two rows.
        seed: the loader's seed.
        epoch: number of the epoch.
        rank: this rank.
        world_size: number of ranks.
        evaluation: whether to leave out batches without a sample for this rank, instead of yielding a filler.
        source: the loader's token; shares keep it alive.
        fingerprint: a number that identifies the samples and, if known, their order; see `fingerprints.py`.
    """

    batches: Iterable[GlobalBatch]
    sizes: Mapping[int, int] | None
    batch_size: int
    seed: int
    epoch: int
    rank: int
    world_size: int
    evaluation: bool = False
    source: LoaderToken | None = None
    fingerprint: int = 0
    _shares: dict[int, BatchShare] = field(default_factory=dict, init=False)  # by size of the global batch
    _made: deque[tuple[int, GlobalBatch]] = field(default_factory=deque, init=False)  # requested, but not yet yielded

    def __len__(self) -> int:
        """Number of batches that this rank yields; TypeError if a batch sampler has no length."""
        if self.sizes is None:
            return len(cast("Sized", self.batches))
        return sum(
            number
            for size, number in self.sizes.items()
            if not self.evaluation or operator.lt(*share_bounds(size, self.rank, self.world_size))
        )

    def __iter__(self) -> Iterator[Fetch]:
        number = 0
        for made in self.batches:
            begin, end = share_bounds(made.size, self.rank, self.world_size)
            copies = 1
            if begin == end:
                if self.evaluation:
                    continue
                # A filler: the step needs a forward and backward pass on every rank. Its weight is 0.
                begin, end, copies = 0, 1, self._division(made.size).rows(self.rank)
            self._made.append((number, made))
            number += 1
            indices = _picked(made.order, made.begin + begin, made.begin + end) * copies
            is_same = made.keys is made.order
            keys = indices if is_same else _picked(made.keys, made.begin + begin, made.begin + end) * copies
            yield Fetch(self.seed, self.epoch, indices, keys)

    def take(self, number: int) -> tuple[BatchShare, int, int]:
        """For this rank's batch `number`, yielded now: its share, the samples consumed including it, and their mark.

        Local. Numbers must increase from call to call.
        """
        while self._made[0][0] < number:
            self._made.popleft()
        _, made = self._made.popleft()
        share, fingerprint = self._shares.get(made.size), self.fingerprint
        if share is None:
            division = self._division(made.size)
            share = self._shares[made.size] = division.share(self.rank, self.evaluation, self.source)
            if self.sizes is None and self.source is not None:
                batch.plans.register(self.source, self.rank, {division})
        if self.sizes is None and self.world_size > 1:
            fingerprint ^= made.mark
        last = made.first + made.size
        # Named by its position in the epoch, because a resumed epoch restarts the count of batches.
        return share.named(f"samples {made.first} to {last - 1} of epoch {self.epoch}", fingerprint), last, made.mark

    def divisions(self) -> set[Division]:
        """How batches are split, if known in advance; empty for an evaluation, whose batches are not for training."""
        return set() if self.evaluation else {self._division(size) for size in self.sizes or ()}

    def _division(self, size: int) -> Division:
        return Division(size, self.batch_size, self.world_size)


def _picked(order: Order | list[int], begin: int, end: int) -> list[int]:
    picked = order[begin:end]
    return picked.tolist() if isinstance(picked, np.ndarray) else list(picked)
