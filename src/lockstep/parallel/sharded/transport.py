"""Buckets of sharded parameters, whose gradients go to their owners, and are averaged only in the step."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.backend import backend_name, engine_of
from lockstep.comm.engine import Engine
from lockstep.parallel.buckets import BucketPlan, view_like
from lockstep.parallel.rank_agreement import Words
from lockstep.parallel.sharded.exchange import WORTH_SENDING
from lockstep.parallel.sharded.gradients import ShardedGradient
from lockstep.parallel.sharded.shares import flat_of
from lockstep.parallel.sharded.sums import SumsInTurns
from lockstep.parallel.symmetric import SymmetricTransport
from lockstep.shm.kernels import find_kernel

__all__ = ["OwnersBucket", "ShardedTransport", "begin_pass", "find_way"]

_TAG = 1 << 20  # tag of the first bucket's messages; users' tags start at 0


def begin_pass(stand_ins: Iterable[ShardedGradient]) -> None:
    """Release the gradients of the last pass when a new one begins to be sent. Local."""
    for each in stand_ins:
        if not each.is_held:
            each.share.drop()
            each.added = None


class ShardedTransport(SymmetricTransport):
    """A `SymmetricTransport` that leaves averaging of some parameters' gradients to the owners of shares.

    These are summed in turns (`sums.py`), in memory of their own. After `finish` every rank may compute the means of
    its shares until the next backward pass.

    Args:
        plans: the parameters in each bucket, and their positions; sharded ones share no bucket with others.
        engine: engine of a group whose ranks share memory.
        stand_ins: `.grad` of the sharded parameters after `finish`, by index.
    """

    def __init__(self, plans: Sequence[BucketPlan], engine: Engine, stand_ins: Mapping[int, ShardedGradient]) -> None:
        sharded = {bucket: plan for bucket, plan in enumerate(plans) if plan.placements[0].index in stand_ins}
        others = list(plans)
        for bucket, plan in sharded.items():
            others[bucket] = replace(plan, placements=(), numel=0)
        super().__init__(others, engine)
        self._plans = plans
        self._description = self._describe()
        self.stand_ins: Mapping[int, ShardedGradient] = stand_ins
        self._sums = SumsInTurns(sharded, {index: each.share for index, each in stand_ins.items()}, engine)
        # By bucket, and offset in it.
        self._sharded = {
            bucket: {each.offset: stand_ins[each.index] for each in plan.placements} for bucket, plan in sharded.items()
        }
        # Memory for `ShardedGradient.sent`, without pages as long as nobody writes to it.
        largest = max(each.numel() * each.element_size() for each in stand_ins.values())
        self._nothing = torch.frombuffer(mmap.mmap(-1, max(largest, 1)), dtype=torch.uint8)
        self._is_new_pass = True

    def view(self, bucket: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor of `like`'s shape and strides; the memory of those of sharded parameters means nothing."""
        if bucket not in self._sharded:
            return super().view(bucket, offset, like)
        sent = view_like(self._nothing[: like.numel() * like.element_size()].view(like.dtype), like)
        self._sharded[bucket][offset].sent = sent
        return sent

    def renew(self, bucket: int) -> None:
        """Move to another address of the same shared memory."""
        if bucket not in self._sharded:
            super().renew(bucket)

    def fill(
        self, bucket: int, offsets: Sequence[int], views: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> Sequence[int]:
        """Add whole gradients to the host's sums, in turns; keep them until then."""
        if bucket not in self._sharded:
            return super().fill(bucket, offsets, views, gradients)
        if self._is_new_pass:
            self._is_new_pass = False
            begin_pass(self.stand_ins.values())
        self._carry([each for each in gradients if isinstance(each, ShardedGradient)])
        self._sums.fill(bucket, dict(zip(offsets, map(_of_this_pass, gradients), strict=True)))
        if self._num_failed == 0:
            self._sums.advance()
        return ()

    def _carry(self, accumulated: Sequence[ShardedGradient]) -> None:
        """Keep gradients that were averaged, but not set to zero, to add them to the means of this pass. Collective."""
        for each in accumulated:
            each.share.carry()
        if accumulated:  # a rank that has set its gradients to zero would make another mean
            self._engine.run_steps("ZeroRedundancyOptimizer: gradients of two averaged backward passes")

    def _reduce(self, bucket: int) -> None:
        if bucket not in self._sharded:
            super()._reduce(bucket)

    def finish(self, buffers: Sequence[torch.Tensor], words: Words) -> list[Words]:
        """Return when all buckets hold the mean over ranks, and the sums of shares are complete. Collective."""
        self._is_new_pass = True
        self._sums.arrive(has_failed=self._num_failed > 0)
        return super().finish(buffers, words)

    def _reduce_rest(self) -> Iterable[None]:
        super()._reduce_rest()
        return self._sums.take_rest()

    def restart(self) -> None:
        """Forget filled and published buckets, and the gradients that have left for them."""
        super().restart()
        self._sums.restart()
        self._is_new_pass = True
        for each in self.stand_ins.values():
            if each.is_sent:
                each.share.parameter.grad = None


def _of_this_pass(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.take_added() if isinstance(gradient, ShardedGradient) else gradient


# ---- groups without shared memory ------------------------------------------------------------------------


def find_way(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """How a group sends shares of gradients on a device to owners; None if averaging whole ones is as fast.

    Gloo's reductions pass sums from rank to rank. With messages each element reaches its owner once, and the sum is
    computed where the optimizer reads it, in the cache.
    """
    if engine_of(group, device) is not None:
        return None
    ways = {("cpu", "gloo"): "messages", ("cuda", "nccl"): "reduce_scatter"}
    return ways.get((device.type, backend_name(group, device)))


class OwnersBucket:
    """Gradients that are sent together, each part to its owner, directly from where autograd wrote them.

    Args:
        number: number of the bucket.
        plan: its parameters, all of them sharded.
        stand_ins: their future `.grad`, by index.
        group: the ranks that average.
        way: see `find_way`.
    """

    def __init__(
        self,
        number: int,
        plan: BucketPlan,
        stand_ins: Mapping[int, ShardedGradient],
        group: dist.ProcessGroup,
        way: str,
    ) -> None:
        self._group, self._sums_at_once, self._tag = group, way == "reduce_scatter", _TAG + number
        self._rank = group.rank()
        self._peers = [each for each in range(group.size()) if each != self._rank]
        members = [(each.offset, stand_ins[each.index].share) for each in plan.placements]
        self._members = sorted(members, key=lambda each: each[1].largest >= WORTH_SENDING)
        sizes = [share.numel for _, share in self._members]
        self._num_small = sum(share.largest < WORTH_SENDING for _, share in self._members)  # which go in one message
        self._numel_small = sum(sizes[: self._num_small])
        rows = 1 if self._sums_at_once else len(self._peers)
        self._came = torch.empty((rows, sum(sizes)), dtype=plan.dtype, device=plan.device)
        self._came_of = list(zip(*(torch.split(row, sizes) for row in self._came), strict=True))
        self._kernel = find_kernel(dist.ReduceOp.AVG, plan.dtype)
        self._by_rank: list[tuple[torch.Tensor, ...]] = []  # parts of all gradients of a pass

    def fill(self, offsets: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Add gradients, which stay in place; zeros if there is none. Local."""
        given = dict(zip(offsets, gradients, strict=True))
        pieces = []
        for (offset, share), came in zip(self._members, self._came_of, strict=True):
            gradient = given.get(offset)
            if isinstance(gradient, ShardedGradient):  # averaged already, and not set to zero
                share.carry()
            own = _of_this_pass(gradient)
            flat = flat_of(torch.zeros_like(share.parameter) if own is None else own, share.parameter)
            parts = [flat[first:last] for first, last in itertools.pairwise(share.bounds)]
            sources = came if self._sums_at_once else (*came[: self._rank], parts[self._rank], *came[self._rank :])
            share.expect(came[0], sources, self._kernel)
            pieces.append(parts)
        self._by_rank = list(zip(*pieces, strict=True))

    def start(self) -> list[Any]:
        """Send the bucket; means may be computed after waiting for the returned works. Collective."""
        group, small = self._group, self._num_small
        by_rank, self._by_rank = self._by_rank, []
        if self._sums_at_once:
            rows = [torch.cat(parts) for parts in by_rank]
            return [dist.reduce_scatter(self._came[0], rows, dist.ReduceOp.AVG, group=group, async_op=True)]
        works = []
        for peer, row, *parts in zip(self._peers, self._came, *self._came_of, strict=True):
            messages = [row[: self._numel_small], *parts[small:]]
            works += [group.recv([each], peer, self._tag) for each in messages if each.numel()]
        for peer in self._peers:
            messages = [torch.cat(by_rank[peer][:small])] if small else []
            messages += by_rank[peer][small:]
            works += [group.send([each], peer, self._tag) for each in messages if each.numel()]
        return works
