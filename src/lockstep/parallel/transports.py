"""How a full bucket is averaged over ranks: in shared memory on one host, or by any c10d group.

A transport owns the memory of the buckets. The reducer fills a bucket, calls `publish`, goes on with
the backward pass, and calls `finish` at its end.

[Note: traffic] What gradient averaging costs on one host is memory traffic, so lines are counted. A gradient that
another rank will reduce is copied into this rank's bucket (one read, one write). A gradient in this rank's own share
stays where autograd wrote it: the reduction reads it there, and writes the mean to both buckets. At two ranks that is
three passes over the gradients instead of four.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lockstep.comm import clock
from lockstep.comm.backend import LockstepProcessGroup
from lockstep.comm.engine import Engine
from lockstep.parallel.agreement import broadcast_tensors
from lockstep.parallel.buckets import BucketPlan
from lockstep.shm.algorithms import reduce_in_place, share_bounds
from lockstep.shm.kernels import Kernel, find_kernel
from lockstep.shm.sync import fence

__all__ = ["GroupTransport", "SymmetricTransport", "Transport", "make_transport"]

_ALIGNMENT_BYTES = 4096
_LINE_BYTES = 64
# Elements of a gradient in the own share from which on leaving it in place beats copying it with the rest.
_WORTH_KEEPING = 32 << 10


def _copy_all(places: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    if places:
        torch._foreach_copy_(list(places), list(gradients))


class Transport(Protocol):
    """What the reducer needs of a transport."""

    def buffer(self, bucket: int) -> torch.Tensor:
        """The flat tensor of a bucket."""

    def view(self, bucket: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor of `like`'s shape and strides at an offset of a bucket, with a version counter of its own."""

    def fill(
        self,
        bucket: int,
        offsets: Sequence[int],
        places: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Move gradients to their places in a bucket. Local; the transport may hold on to them until `finish`.

        Args:
            bucket: which.
            offsets: of the places, in elements of the bucket.
            places: views of the bucket.
            gradients: what autograd computed, in the shapes of the places.
        """

    def publish(self, bucket: int) -> None:
        """This rank's gradients of a bucket are complete. Local."""

    def finish(self) -> None:
        """Return when all buckets hold the mean over ranks. Collective; every bucket was published."""

    def finish_with_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """The same, and overwrite `buffers` by those of the group's first rank. Collective."""


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

    def fill(
        self,
        bucket: int,
        offsets: Sequence[int],
        places: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Copy the gradients."""
        _copy_all(places, gradients)

    def publish(self, bucket: int) -> None:
        """Start the reductions that are due."""
        self._ready.add(bucket)
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

    def finish_with_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Wait for all reductions, then broadcast."""
        self.finish()
        broadcast_tensors(buffers, self._group)


class SymmetricTransport:
    """Buckets in the symmetric memory of a lockstep group, reduced in place by their ranks.

    Every rank owns a share of each bucket: it adds that share of all ranks' buckets and writes the
    mean into all of them. A rank that is through with its backward pass does so at once for all buckets that its peers
    have published meanwhile, and waits only then: reducing fills the time in which others still compute.
    (Reducing between the layers of the own backward pass was measured and is slower: it takes from
    the caches what the next layer needs.)

    [Note: bucket flags] Each rank has one word for each bucket: the number of the backward pass for which its
    gradients are complete. Whoever reads it may reduce the bucket. `finish` is one collective of the group: behind
    its first step everything is published, behind its second everybody's shares are done. So nothing waits outside a
    collective, and a rank that does not come is reported like any other. Buffers ride along: the first rank
    writes them before the first step, the others read them behind it.

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
        self._keepable = [self._find_keepable(bucket) for bucket in range(len(plans))]
        self._words = self._region.words
        self._own_word = self._region.word_start(self._rank)
        self._peer_words = [self._region.word_start(peer) for peer in range(self._world_size) if peer != self._rank]
        self._pass = 1
        self._published: list[int] = []
        # Gradients of this rank's own shares that were not copied: (first element, one past the last, flat tensor).
        self._kept: list[list[tuple[int, int, torch.Tensor]]] = [[] for _ in plans]
        self._reduced: set[int] = set()
        self._mail: _BufferMail | None = None
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

    def fill(
        self,
        bucket: int,
        offsets: Sequence[int],
        places: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Copy what others will reduce; keep what this rank reduces. See [Note: traffic]."""
        keepable = self._keepable[bucket]
        if not keepable:
            _copy_all(places, gradients)
            return
        copied: list[int] = []
        for index, (offset, place, gradient) in enumerate(zip(offsets, places, gradients, strict=True)):
            span = keepable.get(offset)
            if span is None or gradient.stride() != place.stride():
                copied.append(index)
                continue
            first, last = span[0] - offset, span[1] - offset
            source = gradient.as_strided((gradient.numel(),), (1,))
            target = self._parts[bucket][self._rank][offset : offset + gradient.numel()]
            target[:first].copy_(source[:first])
            target[last:].copy_(source[last:])
            self._kept[bucket].append((*span, source[first:last]))
        _copy_all([places[index] for index in copied], [gradients[index] for index in copied])

    def _find_keepable(self, bucket: int) -> dict[int, tuple[int, int]]:
        """Offset -> (first, one past the last) element in this rank's share, of gradients worth leaving in place."""
        low, high = self._shares[bucket][self._rank : self._rank + 2]
        keepable = {}
        for placement in self._plans[bucket].placements:
            first, last = max(placement.offset, low), min(placement.offset + placement.numel, high)
            if last - first >= _WORTH_KEEPING:
                keepable[placement.offset] = (first, last)
        return keepable

    def publish(self, bucket: int) -> None:
        """Let the peers know."""
        fence()
        self._words[self._own_word + bucket] = self._pass
        self._published.append(bucket)

    def _reduce_published(self) -> None:
        """Reduce this rank's shares of the buckets that all ranks have published."""
        start = time.perf_counter()
        words, current = self._words, self._pass
        for bucket in self._published:
            if all(words[word + bucket] >= current for word in self._peer_words):
                self._reduce(bucket)
        clock.add(time.perf_counter() - start)

    def _reduce(self, bucket: int) -> None:
        fence()
        bounds = self._shares[bucket]
        position, end = bounds[self._rank], bounds[self._rank + 1]
        parts, kernel = self._parts[bucket], self._kernels[bucket]
        for start, stop, source in sorted(self._kept[bucket], key=itemgetter(0)):
            reduce_in_place(parts, self._rank, position, start, kernel)
            reduce_in_place(parts, self._rank, start, stop, kernel, source)
            position = stop
        reduce_in_place(parts, self._rank, position, end, kernel)
        self._kept[bucket].clear()
        self._reduced.add(bucket)

    def finish(self) -> None:
        """Reduce what is published, wait for the others, and reduce the rest. Collective."""
        self._finish(self._reduce_rest)

    def finish_with_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """The same, with buffers riding along. Collective."""
        if self._mail is None:
            self._mail = _BufferMail(self._engine, self._rank, buffers)
        mail = self._mail
        mail.write(buffers)

        def between() -> None:
            mail.read(buffers)
            self._reduce_rest()

        self._finish(between)

    def _finish(self, between: Callable[[], None]) -> None:
        self._reduce_published()
        self._engine.run_steps(self._key, self._describe, between)
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


class _BufferMail:
    """Memory through which the first rank's buffers reach the others. Collective to make.

    Args:
        engine: of the group.
        rank: of this process in it.
        buffers: those of the first step; later ones must have the same shapes and dtypes.
    """

    def __init__(self, engine: Engine, rank: int, buffers: Sequence[torch.Tensor]) -> None:
        self._is_source = rank == 0
        offsets, total = [], 0
        for buffer in buffers:
            offsets.append(total)
            num_bytes = buffer.numel() * buffer.element_size()
            total += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        source = engine.allocate(max(total, 1)).parts[0]
        self._places = [
            source[offset : offset + buffer.numel() * buffer.element_size()].view(buffer.dtype).view(buffer.shape)
            for offset, buffer in zip(offsets, buffers, strict=True)
        ]

    def write(self, buffers: Sequence[torch.Tensor]) -> None:
        """The first rank puts its buffers in. Local."""
        if self._is_source:
            with torch.no_grad():
                torch._foreach_copy_(self._places, list(buffers))

    def read(self, buffers: Sequence[torch.Tensor]) -> None:
        """The others take them out. Local; behind a step that follows `write`."""
        if not self._is_source:
            # Through .data: what autograd has saved for a second backward pass may be overwritten.
            torch._foreach_copy_([buffer.data for buffer in buffers], self._places)


def make_transport(plans: Sequence[BucketPlan], group: dist.ProcessGroup) -> Transport:
    """The transport for these buckets over that group. Collective."""
    on_cpu = all(plan.device.type == "cpu" for plan in plans)
    if isinstance(group, LockstepProcessGroup) and on_cpu and group.size() > 1:
        return SymmetricTransport(plans, group)
    return GroupTransport(plans, group)
