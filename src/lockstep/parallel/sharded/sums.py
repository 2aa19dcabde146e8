"""The sums of sharded gradients, stored once per host: each rank adds its gradients to them, in turns.

[Note: turns] If each rank put its gradients into shared memory for their owners to add up, a host would hold as many
gradients as ranks. Here it holds one sum. Rank r takes N turns with each bucket: in turn k it adds to the share that
rank r + k owns (modulo N). In turn 0 it writes to its own share, which overwrites the last sum. So no two ranks write
to a share at once, each share is summed in the same order in every run, and with two ranks in torch's order. A rank may
take turn k with a bucket when its right neighbor has finished turn k - 1 with it, since that one wrote to the same
share. Each rank publishes for each turn how many buckets it has finished; all take buckets in the same order.

During the backward pass a rank takes a turn if it need not wait. It holds a bucket's gradients until its last turn:
usually a bucket or two, since ranks compute at the same pace. At the end of the backward pass the ranks meet, take the
turns that are left, and meet after each.

After a pass that failed, a neighbor's counts may be those of that pass ([Note: failed passes] in `symmetric.py`), so a
rank takes no turn of the next pass before the ranks have met.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm.engine import Engine
from lockstep.parallel.buckets import BucketPlan
from lockstep.parallel.sharded.shares import Share, flat_of
from lockstep.shm.kernels import find_kernel
from lockstep.shm.sync import fence

__all__ = ["SumsInTurns"]

_ALIGNMENT_BYTES = 64


class _Target(NamedTuple):
    """Where a rank's share of one gradient is summed.

    Attributes:
        position: of the parameter in its bucket.
        first: first element of the share.
        last: one past its last element.
        total: the sum, of shape (last - first,).
    """

    position: int
    first: int
    last: int
    total: torch.Tensor


class SumsInTurns:
    """Sums of the gradients of some buckets over the ranks of a host. See [Note: turns].

    Sums of 16-bit gradients are float32.

    Args:
        plans: the buckets, by number.
        shares: this rank's share of each parameter, by index.
        engine: engine of a group whose ranks share memory.
    """

    def __init__(self, plans: Mapping[int, BucketPlan], shares: Mapping[int, Share], engine: Engine) -> None:
        self._rank, self._world_size = engine.team.rank, engine.team.world_size
        self._buckets = list(plans)  # in the order of turns
        self._members = {bucket: [shares[each.index] for each in plan.placements] for bucket, plan in plans.items()}
        self._offsets = {bucket: [each.offset for each in plan.placements] for bucket, plan in plans.items()}
        self._targets = self._place(engine)
        # For each bucket the sums of this rank's shares, by position; without those that have no elements.
        self._own_totals = {
            bucket: {each.position: each.total for each in targets[self._rank]}
            for bucket, targets in self._targets.items()
        }
        words_of = self._region.word_start
        self._own_words = words_of(self._rank)
        self._right_words = words_of((self._rank + 1) % self._world_size)
        self._every_least = [words_of(rank) + self._world_size for rank in range(self._world_size)]
        self._held: dict[int, list[torch.Tensor | None]] = {}  # by bucket: gradients, flat, until the last turn
        self._base = 0  # number of buckets in the finished passes
        self._finished = [0] * self._world_size  # number of buckets of this pass, by turn

    def _place(self, engine: Engine) -> dict[int, list[list[_Target]]]:
        """For each bucket and rank, where the sums of that rank's shares are. Collective."""
        ends = [0] * self._world_size
        places: list[tuple[int, int, int, int]] = []
        for bucket, members in self._members.items():
            for position, share in enumerate(members):
                for owner, (first, last) in enumerate(itertools.pairwise(share.bounds)):
                    if first < last:
                        places.append((bucket, position, owner, ends[owner]))
                        num_bytes = (last - first) * _dtype_of_sum(share).itemsize
                        ends[owner] += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._region = engine.allocate(max(*ends, 1))
        targets: dict[int, list[list[_Target]]] = {each: [[] for _ in ends] for each in self._members}
        for bucket, position, owner, start in places:
            share = self._members[bucket][position]
            first, last = share.bounds[owner : owner + 2]
            dtype = _dtype_of_sum(share)
            total = self._region.parts[owner][start : start + (last - first) * dtype.itemsize].view(dtype)
            targets[bucket][owner].append(_Target(position, first, last, total))
        return targets

    # ---- during a backward pass ----------------------------------------------------------------------

    def fill(self, bucket: int, gradients: Mapping[int, torch.Tensor | None]) -> None:
        """Hold the gradients of a bucket until the last turn with it, and let the shares expect the mean. Local.

        Args:
            bucket: number of the bucket.
            gradients: by offset; None and missing ones count as zero.
        """
        totals, flats = self._own_totals[bucket], list[torch.Tensor | None]()
        for position, (offset, share) in enumerate(zip(self._offsets[bucket], self._members[bucket], strict=True)):
            gradient = gradients.get(offset)
            flats.append(None if gradient is None else flat_of(gradient, share.parameter))
            share.expect_sum(totals.get(position), self._world_size)
        self._held[bucket] = flats

    def advance(self) -> None:
        """Take the turns for which no rank must be waited for. Local."""
        words, finished = self._region.words, self._finished
        for turn in range(self._world_size):
            ready = len(self._buckets) if turn == 0 else min(finished[turn - 1], self._finished_by_right(turn - 1))
            while finished[turn] < ready and self._buckets[finished[turn]] in self._held:
                fence()
                self._take(turn, self._buckets[finished[turn]])
                finished[turn] += 1
                fence()
                words[self._own_words + turn] = self._base + finished[turn]

    def _finished_by_right(self, turn: int) -> int:
        return self._region.words[self._right_words + turn] - self._base

    def _take(self, turn: int, bucket: int) -> None:
        """Add this rank's gradients to the share of one rank."""
        flats = self._held[bucket]
        targets = self._targets[bucket][(self._rank + turn) % self._world_size]
        for position, first, last, total in targets:
            flat = flats[position]
            if turn == 0:
                total.zero_() if flat is None else total.copy_(flat[first:last])
            elif flat is not None:
                total.add_(flat[first:last])
        if turn == self._world_size - 1:
            del self._held[bucket]

    # ---- at its end ----------------------------------------------------------------------------------

    def arrive(self, has_failed: bool) -> None:
        """Announce how far this rank is, before the ranks meet. Local.

        Args:
            has_failed: whether an earlier backward pass failed since the last averaging.
        """
        if not has_failed:
            self.advance()
        turns = sum(each == len(self._buckets) for each in self._finished)
        self._region.words[self._own_words + self._world_size] = turns

    def take_rest(self) -> Iterator[None]:
        """Take the turns that are left; all ranks have met, and meet again at each yield. Local."""
        begun = min(self._region.words[word] for word in self._every_least)
        for turn in range(begun, self._world_size):
            for bucket in self._buckets[self._finished[turn] :]:
                self._take(turn, bucket)
            self._finished[turn] = len(self._buckets)
            if turn < self._world_size - 1:
                yield
        self._base += len(self._buckets)
        for turn in range(self._world_size):
            self._region.words[self._own_words + turn] = self._base
        self.restart()

    def restart(self) -> None:
        """Forget the gradients of a pass that failed, or of one that is over. Local."""
        self._held.clear()
        self._finished = [0] * self._world_size


def _dtype_of_sum(share: Share) -> torch.dtype:
    dtype = share.parameter.dtype
    return find_kernel(dist.ReduceOp.AVG, dtype).accumulate or dtype
