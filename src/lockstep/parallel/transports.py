"""Averages a full bucket over ranks: in shared memory on one host, or by any c10d group.

A transport owns the memory of the buckets. The reducer fills a bucket, calls `publish`, continues with the backward
pass, and calls `finish` at its end. `SymmetricTransport` documents the methods.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from lockstep.agreement import all_reduce_options, broadcast_tensors
from lockstep.comm import clock
from lockstep.comm.backend import backend_name, engine_of
from lockstep.comm.engine import Engine
from lockstep.parallel.buckets import BucketPlan, copy_all, view_like
from lockstep.parallel.claims import NUM_ELEMENTS
from lockstep.parallel.rank_agreement import RankAgreement, Words
from lockstep.parallel.sharded.gradients import ShardedGradient
from lockstep.parallel.sharded.transport import OwnersBucket, ShardedTransport, begin_pass, find_way
from lockstep.parallel.symmetric import SymmetricTransport

__all__ = ["GroupTransport", "Transport", "make_transport"]


class GroupTransport:
    """One asynchronous all_reduce per bucket, by any process group; sharded parameters' buckets go to their owners.

    The last bucket carries the claim ([Note: claims as bits]), and is sent in `finish`, when the claim is known.

    Args:
        plans: the parameters in each bucket, and their positions.
        agreement: compares the ranks with each averaging.
        stand_ins: future `.grad` of sharded parameters, by index; these share no bucket with others.
    """

    def __init__(
        self,
        plans: Sequence[BucketPlan],
        group: dist.ProcessGroup,
        agreement: RankAgreement,
        device: torch.device,
        stand_ins: Mapping[int, ShardedGradient],
    ) -> None:
        self._group, self._world_size = group, group.size()
        self._agreement = agreement
        agreement.sends_samples = False
        # On several hosts: buckets in the shared memory of each host's ranks, reduced in place.
        self._symmetric = _symmetric_engine(group)
        is_ours = self._symmetric is not None and engine_of(group, device) is not None
        self._averages = is_ours or backend_name(group, device) == "nccl"
        self.stand_ins = stand_ins
        self._owners: dict[int, OwnersBucket] = {}
        for bucket, plan in enumerate(plans):
            if plan.placements[0].index in stand_ins:
                way = find_way(group, plan.device)
                assert way is not None
                self._owners[bucket] = OwnersBucket(bucket, plan, stand_ins, group, way)
        self._plans = plans
        last = len(plans) - 1
        # The bucket with the claim; none if values are rounded between hosts, which would change it.
        self._carrier = last if plans and not is_ours and last not in self._owners else None
        # A wire that rounds makes whole blocks nan, and what is nan between gradients would do so in every later step.
        self._gaps = [plan.gaps() if is_ours else None for plan in plans]
        self._divisor = torch.tensor(float(self._world_size), device="cpu")  # a number would be made one in each step
        self._ready: set[int] = set()
        self._works: list[Any] = []
        self._options = all_reduce_options(dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM)
        # A group starts its collectives in the order of calls, which must be the same on all ranks.
        self._next = 0
        if self._world_size > 1:
            self._buffers  # noqa: B018  all ranks are here

    @property
    def can_renew(self) -> bool:
        """False for memory that the ranks of a host have created together."""
        on_cpu = any(plan.device.type == "cpu" for plan in self._plans)  # there may be no plans
        return not (self._averages and self._world_size > 1 and on_cpu)

    @functools.cached_property
    def _buffers(self) -> list[torch.Tensor]:
        """With one rank, they are only created if a communication hook needs them."""
        return [self._allocate(bucket, plan) for bucket, plan in enumerate(self._plans)]

    def _allocate(self, bucket: int, plan: BucketPlan) -> torch.Tensor:
        if bucket in self._owners:
            return torch.empty(0, dtype=plan.dtype, device=plan.device)
        numel = plan.numel + NUM_ELEMENTS if bucket == self._carrier else plan.numel
        if plan.device.type == "cpu" and self._symmetric is not None and self._world_size > 1:
            buffer = self._symmetric.symmetric_empty((numel,), plan.dtype)
        else:
            buffer = torch.zeros(numel, dtype=plan.dtype, device=plan.device)
        if bucket == self._carrier:
            self._agreement.claims.set_elements(buffer[-NUM_ELEMENTS:])
        return buffer

    def buffer(self, bucket: int) -> torch.Tensor:
        buffer = self._buffers[bucket]
        return buffer[:-NUM_ELEMENTS] if bucket == self._carrier else buffer

    def view(self, bucket: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor of `like`'s shape at an offset of a bucket; empty if there is no bucket."""
        if bucket in self._owners:
            return like.new_zeros(()).expand(like.shape)
        return view_like(self._buffers[bucket][offset : offset + like.numel()], like)

    def renew(self, bucket: int) -> None:
        self._buffers[bucket] = self._allocate(bucket, self._plans[bucket])

    def fill(
        self, bucket: int, offsets: Sequence[int], views: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> Sequence[int]:
        """Copy the gradients, and leave them all in place: the copy is reduced while the backward pass continues."""
        if not self._ready:
            begin_pass(self.stand_ins.values())
        if bucket in self._owners:
            self._owners[bucket].fill(offsets, gradients)
        else:
            copy_all(views, gradients)
        return range(len(views))

    def publish(self, bucket: int) -> None:
        self._ready.add(bucket)
        while self._next in self._ready and self._next != self._carrier:
            self._start(self._next)
            self._next += 1

    def _start(self, bucket: int) -> None:
        if bucket in self._owners:
            self._works += self._owners[bucket].start()
            return
        buffer, gaps = self._buffers[bucket], self._gaps[bucket]
        if gaps is not None:
            buffer.index_fill_(0, gaps, 0)
        if not self._averages:
            # Divide first, which keeps 16-bit sums in range, as torch's DDP and nccl's average do.
            buffer.div_(self._divisor)
        # The group's own method: `dist.all_reduce` spends more time on its arguments than on the start.
        self._works.append(self._group.allreduce([buffer], self._options))

    def finish(self, buffers: Sequence[torch.Tensor], words: Words) -> list[Words] | None:
        """Wait for all reductions, compare claims, and broadcast the buffers."""
        start = time.perf_counter()
        claims, carrier = self._agreement.claims, self._carrier
        if carrier is None:
            claims.exchange(words.claim)
        else:
            claims.write(words.claim)
            self._start(carrier)
        for work in self._works:
            work.wait()
        clock.add(time.perf_counter() - start)
        self._begin_anew()
        if carrier is not None:
            claims.read()
        if buffers:
            broadcast_tensors(buffers, self._group)
        return None

    def restart(self) -> None:
        """Wait for running reductions; ranks whose pass failed at the same point are then in step again."""
        for work in self._works:
            with contextlib.suppress(RuntimeError):
                work.wait()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._works.clear()
        self._ready.clear()
        self._next = 0


Transport: TypeAlias = SymmetricTransport | GroupTransport


def _symmetric_engine(group: dist.ProcessGroup) -> Engine | None:
    """The engine of a group with symmetric memory; None for other groups."""
    engine = engine_of(group)
    return engine if engine is not None and engine.team.has_symmetric_memory else None


def make_transport(
    plans: Sequence[BucketPlan],
    group: dist.ProcessGroup,
    agreement: RankAgreement,
    device: torch.device,
    stand_ins: Mapping[int, ShardedGradient],
) -> Transport:
    """The transport for these buckets over that group. Collective.

    Args:
        plans: the parameters in each bucket, and their positions; may be empty.
        device: device of the parameters; used if there are no buckets.
        stand_ins: future `.grad` of sharded parameters, by index; only if ranks share memory, or `find_way` finds a
            way.
    """
    devices = [plan.device for plan in plans] or [device]
    engine = _symmetric_engine(group)
    on_cpu = all(each.type == "cpu" for each in devices)
    if engine is not None and engine.team.shares_memory and on_cpu and group.size() > 1:
        return ShardedTransport(plans, engine, stand_ins) if stand_ins else SymmetricTransport(plans, engine)
    return GroupTransport(plans, group, agreement, devices[0], stand_ins)
