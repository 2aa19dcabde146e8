"""How a full bucket is averaged over ranks: in shared memory on one host, or by any c10d group.

A transport owns the memory of the buckets. The reducer fills a bucket, calls `publish`, goes on with
the backward pass, calls `progress` now and then, and `finish` at its end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lockstep.comm import clock
from lockstep.comm.backend import LockstepProcessGroup
from lockstep.parallel.buckets import BucketPlan
from lockstep.shm.algorithms import reduce_in_place, share_bounds
from lockstep.shm.kernels import Kernel, find_kernel
from lockstep.shm.sync import fence

__all__ = ["GroupTransport", "SymmetricTransport", "Transport", "make_transport"]

_ALIGNMENT_BYTES = 4096


class Transport(Protocol):
    """What the reducer needs of a transport."""

    def buffer(self, bucket: int) -> torch.Tensor:
        """The flat tensor of a bucket."""

    def view(self, bucket: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor of `like`'s shape and strides at an offset of a bucket, with a version counter of its own."""

    def publish(self, bucket: int) -> None:
        """This rank's gradients of a bucket are complete. Local."""

    def progress(self) -> None:
        """Do what can be done without waiting. Local."""

    def finish(self) -> None:
        """Return when all buckets hold the mean over ranks. Collective; every bucket was published."""


def _like(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`flat` in the shape and, where it is dense, the strides of `like`."""
    dense = torch.empty_like(like, device="meta")
    return flat.as_strided(like.shape, dense.stride()) if like.dim() else flat.view(())


class GroupTransport:
    """Buckets in ordinary memory, one asynchronous all_reduce for each, by any process group.

    Args:
        plans: the buckets.
        group: who takes part.
    """

    def __init__(self, plans: Sequence[BucketPlan], group: dist.ProcessGroup) -> None:
        self._group = group
        self._world_size = group.size()
        self._buffers = [torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device) for plan in plans]
        self._ready: set[int] = set()
        self._works: list[Any] = []
        # A group starts its collectives in the order of the calls, which must be one order on all ranks.
        self._next = 0

    def buffer(self, bucket: int) -> torch.Tensor:
        """The flat tensor of a bucket."""
        return self._buffers[bucket]

    def view(self, bucket: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor of `like`'s shape at an offset of a bucket; `.data` gives it a version counter of its own."""
        return _like(self._buffers[bucket][offset : offset + like.numel()], like).data

    def publish(self, bucket: int) -> None:
        """Start the reductions that are due."""
        self._ready.add(bucket)
        self.progress()

    def progress(self) -> None:
        """Start reductions in bucket order."""
        while self._next in self._ready:
            buffer = self._buffers[self._next]
            # Dividing first keeps 16-bit sums in range, and is what torch's DDP does, bit for bit.
            buffer.div_(self._world_size)
            self._works.append(dist.all_reduce(buffer, group=self._group, async_op=True))
            self._next += 1

    def finish(self) -> None:
        """Wait for all reductions."""
        start = time.perf_counter()
        for work in self._works:
            work.wait()
        clock.add(time.perf_counter() - start)
        self._works.clear()
        self._ready.clear()
        self._next = 0


class SymmetricTransport:
    """Buckets in the symmetric memory of a lockstep group, reduced in place by their ranks.

    Every rank owns a share of each bucket: it adds that share of all ranks' buckets and writes the
    mean into all of them. It may do so as soon as all ranks have published the bucket, which it
    sees without a call; so ranks reduce between the layers of the backward pass, whoever has time first.

    [Note: bucket flags] Each rank has one word for each bucket: the number of the backward pass for which its
    gradients are complete. `finish` is one collective of the group: behind its first step everything is
    published, behind its second everybody's shares are done. So nothing waits outside a collective, and a
    rank that does not come is reported like any other.

    Args:
        plans: the buckets.
        group: a lockstep group.
    """

    def __init__(self, plans: Sequence[BucketPlan], group: LockstepProcessGroup) -> None:
        self._engine = group.engine
        self._rank = group.rank()
        self._world_size = group.size()
        self._plans = plans
        self._starts: list[int] = []
        total = 0
        for plan in plans:
            self._starts.append(total)
            total += -(-plan.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._region = self._engine.allocate(max(total, 1))
        self._parts = [self._bucket_parts(bucket) for bucket in range(len(plans))]
        self._kernels: list[Kernel] = [find_kernel(dist.ReduceOp.AVG, plan.dtype) for plan in plans]
        self._shares = [share_bounds(plan.numel, self._world_size) for plan in plans]
        words = self._region.words
        self._words = words
        self._own_word = self._region.word_start(self._rank)
        self._peer_words = [self._region.word_start(peer) for peer in range(self._world_size) if peer != self._rank]
        self._pass = 1
        self._published: list[int] = []
        self._reduced: set[int] = set()
        self._key = ("ddp", tuple(plan.numel for plan in plans))

    def _bucket_parts(self, bucket: int) -> list[torch.Tensor]:
        plan, start = self._plans[bucket], self._starts[bucket]
        return [part[start : start + plan.num_bytes].view(plan.dtype) for part in self._region.parts]

    def buffer(self, bucket: int) -> torch.Tensor:
        """The flat tensor of a bucket."""
        return self._parts[bucket][self._rank]

    def view(self, bucket: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor of `like`'s shape at an offset of a bucket; `.data` gives it a version counter of its own."""
        return _like(self._parts[bucket][self._rank][offset : offset + like.numel()], like).data

    def publish(self, bucket: int) -> None:
        """Let the peers know."""
        fence()
        self._words[self._own_word + bucket] = self._pass
        self._published.append(bucket)

    def progress(self) -> None:
        """Reduce this rank's shares of buckets that all ranks have published."""
        words, current = self._words, self._pass
        for bucket in self._published:
            if bucket in self._reduced:
                continue
            if all(words[start + bucket] >= current for start in self._peer_words):
                start = time.perf_counter()
                self._reduce(bucket)
                clock.add(time.perf_counter() - start)

    def _reduce(self, bucket: int) -> None:
        fence()
        bounds = self._shares[bucket]
        low, high = bounds[self._rank], bounds[self._rank + 1]
        reduce_in_place(self._parts[bucket], self._rank, low, high, self._kernels[bucket])
        self._reduced.add(bucket)

    def finish(self) -> None:
        """Reduce what is left, and wait until everybody has. Collective."""
        self._engine.run_steps(self._key, self._describe, self._reduce_rest)
        self._pass += 1
        self._published.clear()
        self._reduced.clear()

    def _reduce_rest(self) -> None:
        for bucket in range(len(self._plans)):
            if bucket not in self._reduced:
                self._reduce(bucket)

    def _describe(self) -> str:
        sizes = ", ".join(str(plan.numel) for plan in self._plans[:8])
        return f"DistributedDataParallel's gradient averaging({len(self._plans)} buckets: {sizes})"


def make_transport(plans: Sequence[BucketPlan], group: dist.ProcessGroup) -> Transport:
    """The transport for these buckets over that group. Collective."""
    on_cpu = all(plan.device.type == "cpu" for plan in plans)
    if isinstance(group, LockstepProcessGroup) and on_cpu and group.size() > 1:
        return SymmetricTransport(plans, group)
    return GroupTransport(plans, group)
