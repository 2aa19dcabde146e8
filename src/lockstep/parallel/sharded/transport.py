"""Buckets in symmetric memory, of which those of sharded parameters are not reduced before the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lockstep.comm.engine import Engine
from lockstep.parallel.buckets import BucketPlan, copy_all
from lockstep.parallel.sharded.gradients import ShardedGradient
from lockstep.parallel.sharded.shares import Share
from lockstep.parallel.symmetric import SymmetricTransport

__all__ = ["ShardedTransport"]


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

    def _bind(self, bucket: int) -> None:
        for offset, share in self._sharded[bucket].items():
            numel = share.parameter.numel()
            share.bind([part[offset : offset + numel] for part in self._parts[bucket]], self._kernels[bucket])

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
        """Copy them whole: an own share left where autograd wrote it would keep all of the gradient until the step."""
        shares = self._sharded[bucket]
        if not shares:
            return super().fill(bucket, offsets, views, gradients)
        if self._is_new_pass:
            self._begin()
        self._carry([each for each in gradients if isinstance(each, ShardedGradient)])
        for share in shares.values():
            share.expect()
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        for view, gradient in zip(views, gradients, strict=True):
            own: torch.Tensor | None = gradient
            if isinstance(gradient, ShardedGradient):
                own = gradient.take_added()
            if own is None:
                view.zero_()
            else:
                copied.append((view, own))
        copy_all([view for view, _ in copied], [own for _, own in copied])
        return ()

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
            self._engine.run_steps("ZeroRedundancyOptimizer: gradients of two averaged backward passes")

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
