"""Buckets of sharded parameters, whose gradients go to their owners, and are averaged only in the step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.backend import backend_name, engine_of
from lockstep.comm.engine import Engine
from lockstep.parallel.buckets import BucketPlan, copy_all
from lockstep.parallel.sharded.exchange import WORTH_SENDING
from lockstep.parallel.sharded.gradients import ShardedGradient
from lockstep.parallel.sharded.shares import Share, flat_of
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

    Their buckets contain nothing else. After `finish` the ranks have met, and every rank may compute the means of its
    shares until the next backward pass overwrites the gradients, which it does only after waiting for all ranks.

    Args:
        plans: the parameters in each bucket, and their positions.
        engine: engine of a group whose ranks share memory.
        stand_ins: `.grad` of the sharded parameters after `finish`, by index.
    """

    def __init__(self, plans: Sequence[BucketPlan], engine: Engine, stand_ins: Mapping[int, ShardedGradient]) -> None:
        super().__init__(plans, engine)
        self.stand_ins: Mapping[int, ShardedGradient] = stand_ins
        # For each bucket the shares, and where the ranks put what they are shares of.
        self._sharded = [self._find_shares(bucket) for bucket in range(len(plans))]
        self._is_new_pass = True

    def _find_shares(self, bucket: int) -> list[tuple[Share, list[torch.Tensor]]]:
        placements = [each for each in self._plans[bucket].placements if each.index in self.stand_ins]
        found = [(each.offset, self.stand_ins[each.index].share) for each in placements]
        parts = self._parts[bucket]
        return [(share, [part[at + share.first : at + share.last] for part in parts]) for at, share in found]

    def renew(self, bucket: int) -> None:
        """Move to another address of the same shared memory."""
        super().renew(bucket)
        self._sharded[bucket] = self._find_shares(bucket)

    def fill(
        self, bucket: int, offsets: Sequence[int], views: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> Sequence[int]:
        """Copy whole gradients: a share left where autograd wrote it would keep the whole gradient until the step."""
        shares = self._sharded[bucket]
        if not shares:
            return super().fill(bucket, offsets, views, gradients)
        if self._is_new_pass:
            self._is_new_pass = False
            begin_pass(self.stand_ins.values())
        self._carry([each for each in gradients if isinstance(each, ShardedGradient)])
        for share, sources in shares:
            share.expect(sources[self._rank], sources, self._kernels[bucket])
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        for view, gradient in zip(views, gradients, strict=True):
            own = _of_this_pass(gradient)
            if own is None:
                view.zero_()
            else:
                copied.append((view, own))
        copy_all([view for view, _ in copied], [own for _, own in copied])
        return ()

    def _carry(self, accumulated: Sequence[ShardedGradient]) -> None:
        """Keep gradients that were averaged, but not set to zero, to add them to the means of this pass. Collective.

        All ranks compute theirs before any rank overwrites their sources.
        """
        for each in accumulated:
            each.share.carry()
        if accumulated:
            self._engine.run_steps("ZeroRedundancyOptimizer: gradients of two averaged backward passes")

    def _reduce(self, bucket: int) -> None:
        if self._sharded[bucket]:
            self._is_new_pass = True
            self._reduced.add(bucket)
        else:
            super()._reduce(bucket)

    def restart(self) -> None:
        """Forget filled and published buckets."""
        super().restart()
        self._is_new_pass = True


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
