"""Which samples, in which order, on which rank: pure functions of a few integers.

One epoch is an order of `num_samples` indices. A global batch is a run of `batch_size`
consecutive positions in it, and a rank's share is a run of the batch:

    order      7 2 9 4 | 0 8 1 6 | 5 3          10 samples, batch_size 4
    rank 0     7 2     | 0 8     | 5            world_size 2
    rank 1         9 4 |     1 6 |   3

So putting the ranks' shares side by side gives back the batch, and putting the batches after each other gives back the
order, at any number of ranks. The order itself is an array of integers (a `range` when nothing is shuffled, or computed
where it is asked for), never a list: Python integers exist for one batch at a time.
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
        return sum(self.sizes().values())

    def sizes(self) -> dict[int, int]:
        """How many of them there are of each size."""
        full, rest = divmod(max(self.num_samples - self.start, 0), self.batch_size)
        numbers = {self.batch_size: full, rest: int(rest > 0 and not self.drop_last)}
        return {size: number for size, number in numbers.items() if number}

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

    The process-wide generators are seeded with (seed, epoch) while it runs and put back afterwards, so a
    `RandomSampler` or `WeightedRandomSampler` without a generator of its own draws alike on all ranks.

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


class GlobalBatch(NamedTuple):
    """One batch of an epoch, of all ranks together.

    Attributes:
        order: the indices of its samples, from `begin` on.
        keys: what seeds these, as `seed_keys` has it, from there on.
        begin: of the batch, in both.
        size: its number of samples; at least one.
        first: samples of the epoch before it.
        mark: of the order, or of all batches up to its end; see `iteration.EpochProgress`.
    """

    order: Order | list[int]
    keys: Order | list[int]
    begin: int
    size: int
    first: int
    mark: int = 0


@dataclass(frozen=True)
class OrderedBatches:
    """The global batches of an epoch whose order is known: runs of it.

    Attributes:
        order: the indices of the epoch, the same on every rank.
        plan: where the batches begin and end.
        keys: what seeds the samples, in the same order; None for the indices.
        mark: of the order.
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
    """The batches of one rank in one epoch: its parts of the global ones. Iterating gives a `Fetch` per batch.

    Attributes:
        batches: the global ones, from where the epoch begins or is resumed.
        sizes: how many of these are of each size; None if they are made as they come.
        batch_size: samples in a full one. Of batches of any sizes the number of ranks: a filler has two rows then.
        seed: the loader's.
        epoch: number of the epoch.
        rank: this rank.
        world_size: number of ranks.
        evaluation: leave out batches of which this rank holds nothing, instead of yielding a filler.
        source: of the loader; its shares keep it alive.
        fingerprint: a number for the samples and, where it is known, their order; see `fingerprints.py`.
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
    _shares: dict[int, BatchShare] = field(default_factory=dict, init=False)  # of batches yielded, by size
    _made: deque[tuple[int, GlobalBatch]] = field(default_factory=deque, init=False)  # and not yet yielded

    def __len__(self) -> int:
        """Number of batches that this rank yields; TypeError where a batch sampler has no length."""
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
        """What this rank holds of its batch `number`, which is yielded now; samples consumed with it, and their mark.

        Local. Asked for growing numbers.
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
        # Named by its position in the epoch: a resumed epoch counts its batches anew.
        return share.named(f"samples {made.first} to {last - 1} of epoch {self.epoch}", fingerprint), last, made.mark

    def divisions(self) -> set[Division]:
        """How the batches are split, as far as it is known ahead; those of an evaluation are not for training."""
        return set() if self.evaluation else {self._division(size) for size in self.sizes or ()}

    def _division(self, size: int) -> Division:
        return Division(size, self.batch_size, self.world_size)


def _picked(order: Order | list[int], begin: int, end: int) -> list[int]:
    picked = order[begin:end]
    return picked.tolist() if isinstance(picked, np.ndarray) else list(picked)
