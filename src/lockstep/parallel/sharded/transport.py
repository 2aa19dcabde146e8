"""Buckets in symmetric memory, of which those of sharded parameters are not reduced before the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lockstep.comm.engine import Engine
from lockstep.parallel.buckets import BucketPlan, copy_all
from lockstep.parallel.sharded.gradients import ShardedGradient
from lockstep.parallel.sharded.shares import Share
from lockstep.parallel.symmetric import SymmetricTransport
from lockstep.shm.segment import give_back
from lockstep.shm.support import segment_folder

__all__ = ["ShardedTransport"]

# Elements of an own share from which on leaving it in place beats copying it with the rest. It keeps the whole gradient
# of autograd's alive until the step, so it is done where half of it is the own share: there it saves most.
_WORTH_KEEPING = 8 << 10
_WORLD_SIZE_KEPT = 2
_HUGE_PAGE_BYTES = 2 << 20


class ShardedTransport(SymmetricTransport):
    """A `SymmetricTransport` that leaves the gradients of some parameters to those who own shares of them.

    Their buckets hold nothing else. After `finish` the ranks have met, and every rank may ask its shares for means,
    until the next backward pass overwrites what they are made of: a pass that does so has waited for all ranks.

    Args:
        plans: which parameters lie in each bucket, and where.
        engine: of a group whose ranks share memory.
        stand_ins: what `.grad` of the sharded parameters is from `finish` on, by index.
    """

    def __init__(self, plans: Sequence[BucketPlan], engine: Engine, stand_ins: Mapping[int, ShardedGradient]) -> None:
        super().__init__(plans, engine)
        self.stand_ins: Mapping[int, ShardedGradient] = stand_ins
        # For each bucket, by the offset of the gradient.
        self._sharded: list[dict[int, Share]] = [
            {each.offset: stand_ins[each.index].share for each in plan.placements if each.index in stand_ins}
            for plan in plans
        ]
        self._is_new_pass = True
        for bucket in range(len(plans)):
            self._bind(bucket)
        self._give_back()

    def _bind(self, bucket: int) -> None:
        for offset, share in self._sharded[bucket].items():
            numel = share.parameter.numel()
            share.bind([part[offset : offset + numel] for part in self._parts[bucket]], self._kernels[bucket])

    def _is_kept(self, share: Share) -> bool:
        return self._world_size <= _WORLD_SIZE_KEPT and share.numel >= _WORTH_KEEPING

    def _give_back(self) -> None:
        """Memory of own shares that are not copied to their bucket: whole huge pages, so that their neighbours stay."""
        if segment_folder() is not None:
            return  # whoever touches them again may find that the folder is full
        for bucket, shares in enumerate(self._sharded):
            own = self._parts[bucket][self._rank].view(torch.uint8)
            size = self._plans[bucket].dtype.itemsize
            for offset, share in shares.items():
                first = own.data_ptr() + (offset + share.first) * size
                low = -(-first // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
                high = (first + share.numel * size) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
                if self._is_kept(share) and high > low:
                    give_back(own[low - own.data_ptr() : high - own.data_ptr()])

    def renew(self, bucket: int) -> None:
        """The same shared memory at another address."""
        super().renew(bucket)
        self._bind(bucket)

    def fill(
        self,
        bucket: int,
        offsets: Sequence[int],
        views: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> Sequence[int]:
        """Copy what others will sum; keep what this rank sums, where it is worth it."""
        shares = self._sharded[bucket]
        if not shares:
            return super().fill(bucket, offsets, views, gradients)
        if self._is_new_pass:
            self._begin()
        self._carry([each for each in gradients if isinstance(each, ShardedGradient)])
        for share in shares.values():
            share.expect()
        kept: list[int] = []
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        for position, (offset, view, gradient) in enumerate(zip(offsets, views, gradients, strict=True)):
            own: torch.Tensor | None = gradient
            if isinstance(gradient, ShardedGradient):
                own = gradient.take_added()
            share = shares[offset]
            if own is None:
                view.zero_()
            elif not self._is_kept(share) or own.stride() != view.stride():
                copied.append((view, own))
            else:
                self._copy_out(bucket, offset, share, own)
                kept.append(position)
        copy_all([view for view, _ in copied], [own for _, own in copied])
        return kept

    def _begin(self) -> None:
        """A pass begins to go out: let go of what the last one left."""
        self._is_new_pass = False
        for stand_in in self.stand_ins.values():
            if not stand_in.is_held:
                stand_in.share.drop()
                stand_in.added = None

    def _carry(self, accumulated: Sequence[ShardedGradient]) -> None:
        """Gradients that were averaged already, and not set to zero, are added to the means of this pass. Collective.

        All ranks make theirs before anybody overwrites what they are made of.
        """
        for each in accumulated:
            each.share.carry()
        if accumulated:
            self._engine.run_steps(
                "carry", lambda: "ZeroRedundancyOptimizer: gradients of two averaged backward passes", lambda: None
            )

    def _copy_out(self, bucket: int, offset: int, share: Share, gradient: torch.Tensor) -> None:
        # Detached: with create_graph=True a gradient has a graph, which is of no use to what is sent.
        source = gradient.detach().as_strided((gradient.numel(),), (1,))
        target = self._parts[bucket][self._rank][offset : offset + gradient.numel()]
        if share.first:
            target[: share.first].copy_(source[: share.first])
        if share.last < gradient.numel():
            target[share.last :].copy_(source[share.last :])
        share.arrive(source[share.first : share.last])

    def _reduce(self, bucket: int) -> None:
        if self._sharded[bucket]:
            self._is_new_pass = True
            self._reduced.add(bucket)
        else:
            super()._reduce(bucket)

    def restart(self) -> None:
        """Forget what was filled and published."""
        super().restart()
        self._is_new_pass = True
