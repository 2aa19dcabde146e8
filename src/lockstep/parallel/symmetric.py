"""Buckets in the symmetric memory of a lockstep group, reduced in place by their ranks.

[Note: traffic] What gradient averaging costs on one host is memory traffic, so lines are counted. A gradient that
another rank will reduce is copied into this rank's bucket (one read, one write). A gradient in this rank's own share
stays where autograd wrote it: the reduction reads it there, and writes the mean to both buckets. At two ranks that is
three passes over the gradients instead of four. From four ranks on it is the smaller part of them, and all are copied:
the buckets of all ranks are then rows of one matrix, which is reduced by calls of torch for all rows (`RowShare`).
Measured for the share of a bucket of 1 MiB, in one process: of 8 ranks 139 µs, and 304 by calls for each; of 4, 90 and
134; of 25 MiB 5.2 ms and 7.9, 5.9 and 8.7.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

import torch
import torch.distributed as dist

from lockstep.comm import clock
from lockstep.comm.engine import Engine
from lockstep.comm.flight_recorder import fingerprint
from lockstep.comm.wording import describe_tensor
from lockstep.errors import CollectiveMismatch
from lockstep.parallel.buckets import BucketPlan, copy_all, view_like
from lockstep.parallel.rank_agreement import ADVICE, Words
from lockstep.shm.algorithms import ROWS_BYTES, reduce_in_place
from lockstep.shm.kernels import Kernel, find_kernel
from lockstep.shm.row_tree import RowShare, even_bounds
from lockstep.shm.segment import can_leave, leave
from lockstep.shm.sync import fence
from lockstep.torch_private.tensors import foreach_copy_

__all__ = ["SymmetricTransport"]

_ALIGNMENT_BYTES = 4096
_LINE_BYTES = 64
# Elements of a gradient in the own share from which on leaving it in place beats copying it with the rest.
_WORTH_KEEPING = 32 << 10
_MANY = 4  # ranks, see [Note: traffic]


class SymmetricTransport:
    """Buckets in the symmetric memory of a lockstep group, reduced in place by their ranks.

    Every rank owns a share of each bucket: it adds that share of all ranks' buckets and writes the
    mean into all of them. A rank that is through with its backward pass does so at once for all buckets that its peers
    have published meanwhile, and waits only then: reducing fills the time in which others still compute.

    [Note: bucket flags] Each rank has one word for each bucket: the number of the backward pass for which its
    gradients are complete. A rank that reads it may reduce the bucket. `finish` is one collective of the group: after
    its first step everything is published, after its second everybody's shares are done. So nothing waits outside a
    collective, and a rank that does not come is reported like any other. Buffers ride along: the first rank
    writes them before the first step, the others read them after it. A region has words for so many
    buckets only; those beyond are reduced after the first step.

    [Note: failed passes] A pass that an exception ended on all ranks leaves flags behind that look like those
    of the next. Nobody can take them back in time, as a peer may read them first. So a rank that has failed
    believes no flag in its next pass, and reduces everything after the first step. How often it has failed since
    the last averaging is part of what the ranks compare there: one that failed alone, and would bring the
    gradients of its next step to a meeting for this one, is an error on all of them. That error is a failed
    pass, too, and the same on all ranks that were there, which then agree again.

    Args:
        plans: which parameters lie in each bucket, and where.
        engine: of a group whose ranks share memory.

    Attributes:
        stand_ins: what `.grad` becomes with `finish`, by parameter, where it is no view of a bucket: none here.
    """

    def __init__(self, plans: Sequence[BucketPlan], engine: Engine) -> None:
        self._engine = engine
        self._rank = engine.team.rank
        self._world_size = engine.team.world_size
        self._plans = plans
        self._starts: list[int] = []
        total = 0
        for plan in plans:
            self._starts.append(total)
            total += -(-plan.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._region = self._engine.allocate(max(total, 1))
        self._parts = [
            [part[start : start + plan.num_bytes].view(plan.dtype) for part in self._region.parts]
            for start, plan in zip(self._starts, plans, strict=True)
        ]
        self._kernels: list[Kernel] = [find_kernel(dist.ReduceOp.AVG, plan.dtype) for plan in plans]
        self._shares = [even_bounds(plan.numel, self._world_size) for plan in plans]
        # By bucket, where ranks are many; not of those that have moved to another address.
        self._rows = dict(enumerate(self._row_shares())) if self._world_size >= _MANY else {}
        self._keepable = [self._find_keepable(bucket) for bucket in range(len(plans))]
        self._words = self._region.words
        self._own_word = self._region.word_start(self._rank)
        self._peer_words = [self._region.word_start(peer) for peer in range(self._world_size) if peer != self._rank]
        self._num_flags = min(len(plans), self._region.WORDS_PER_RANK - 3)
        # The last words of each rank: signs, a value of its parameters, and which batches its gradients come from.
        ends = map(self._region.word_start, range(1, self._world_size + 1))
        self._said = [slice(end - 3, end) for end in ends]
        self._pass = 1
        # Failed passes since the last averaging, or since the collective that was an error itself.
        self._num_failed = 0
        self._failed_collective = 0
        self._published: list[int] = []
        # Gradients of this rank's own shares that were not copied: (first element, one past the last, flat tensor).
        self._kept: list[list[tuple[int, int, torch.Tensor]]] = [[] for _ in plans]
        self._reduced: set[int] = set()
        self._mail: _BufferMail | None = None
        self.stand_ins: Mapping[int, torch.Tensor] = {}
        self._description = self._describe()

    def _row_shares(self) -> Iterator[RowShare]:
        sums: dict[torch.dtype, torch.Tensor] = {}
        for start, plan, kernel in zip(self._starts, self._plans, self._kernels, strict=True):
            dtype = kernel.accumulate or plan.dtype
            if dtype not in sums:
                sums[dtype] = torch.empty(ROWS_BYTES // dtype.itemsize, dtype=dtype, device="cpu")
            rows = self._region.rows[:, start : start + plan.num_bytes].view(plan.dtype)
            yield RowShare(rows, self._rank, sums[dtype], is_handed_back=True)

    @property
    def can_renew(self) -> bool:
        """Whether `renew` works."""
        return can_leave(_ALIGNMENT_BYTES)

    def buffer(self, bucket: int) -> torch.Tensor:
        """The flat tensor of a bucket."""
        return self._parts[bucket][self._rank]

    def view(self, bucket: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor of `like`'s shape and strides at an offset of a bucket; see `view_like`."""
        return view_like(self._parts[bucket][self._rank][offset : offset + like.numel()], like)

    def renew(self, bucket: int) -> None:
        """Move to another address: views made before keep the old one, and its content. Local; nothing is under way.

        Only where `can_renew`. Views of the new memory are to be made anew.
        """
        part = self._parts[bucket][self._rank]
        self._parts[bucket][self._rank] = leave(part.view(torch.uint8)).view(part.dtype)
        self._rows.pop(bucket, None)

    def fill(
        self,
        bucket: int,
        offsets: Sequence[int],
        views: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> Sequence[int]:
        """Copy what others will reduce; keep what this rank reduces. Local. See [Note: traffic].

        Args:
            offsets: of the views, in elements of the bucket.
            views: of the memory of the bucket.
            gradients: what autograd computed, in the shapes of the views.

        Returns:
            Which of them were not copied, or not as a whole: the transport holds on to those until `finish`.
        """
        keepable = self._keepable[bucket]
        if not keepable:
            copy_all(views, gradients)
            return ()
        copied: list[int] = []
        kept: list[int] = []
        for index, (offset, view, gradient) in enumerate(zip(offsets, views, gradients, strict=True)):
            span = keepable.get(offset)
            if span is None or gradient.stride() != view.stride():
                copied.append(index)
                continue
            first, last = span[0] - offset, span[1] - offset
            # Detached: with create_graph=True a gradient has a graph, which is of no use to what is sent.
            source = gradient.detach().as_strided((gradient.numel(),), (1,))
            target = self._parts[bucket][self._rank][offset : offset + gradient.numel()]
            target[:first].copy_(source[:first])
            target[last:].copy_(source[last:])
            self._kept[bucket].append((*span, source[first:last]))
            kept.append(index)
        copy_all([views[index] for index in copied], [gradients[index] for index in copied])
        return kept

    def _find_keepable(self, bucket: int) -> dict[int, tuple[int, int]]:
        """Offset -> (first, one past the last) element in this rank's share, of gradients worth leaving in place."""
        keepable: dict[int, tuple[int, int]] = {}
        if self._world_size >= _MANY:
            return keepable
        low, high = self._shares[bucket][self._rank : self._rank + 2]
        for placement in self._plans[bucket].placements:
            first, last = max(placement.offset, low), min(placement.offset + placement.numel, high)
            if last - first >= _WORTH_KEEPING:
                keepable[placement.offset] = (first, last)
        return keepable

    def publish(self, bucket: int) -> None:
        """This rank's gradients of a bucket are complete: let the peers know. Local."""
        if bucket < self._num_flags:
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
        self._reduced.add(bucket)
        if bucket in self._rows:
            self._rows[bucket].reduce(self._kernels[bucket])
            return
        bounds = self._shares[bucket]
        position, end = bounds[self._rank], bounds[self._rank + 1]
        parts, kernel = self._parts[bucket], self._kernels[bucket]
        for start, stop, source in sorted(self._kept[bucket], key=itemgetter(0)):
            reduce_in_place(parts, self._rank, position, start, kernel)
            reduce_in_place(parts, self._rank, start, stop, kernel, source)
            position = stop
        reduce_in_place(parts, self._rank, position, end, kernel)
        self._kept[bucket].clear()

    def finish(self, buffers: Sequence[torch.Tensor], words: Words) -> list[Words]:
        """Return when all buckets hold the mean over ranks. Collective; every bucket was published.

        Args:
            buffers: overwritten by those of the group's first rank.
            words: what this rank says of this step.

        Returns:
            The words of all ranks; `GroupTransport` does not send them, and returns None.

        Raises:
            CollectiveMismatch: the ranks do not agree.
        """
        mail = self._mail
        if buffers:
            if mail is None or not mail.fits(buffers):
                mail = self._mail = _BufferMail(self._engine, self._rank, buffers)
            mail.write(buffers)

        by_rank: list[Words] = []

        def between() -> None:
            for said in self._said:
                signs, sample, batches = self._words[said]
                by_rank.append(Words(batches=batches, sample=sample, signs=signs))
            if buffers:
                assert mail is not None
                mail.read(buffers)
            self._reduce_rest()

        for index, word in enumerate((words.signs, words.sample, words.batches), self._said[self._rank].start):
            self._words[index] = word
        if self._num_failed == 0:
            self._reduce_published()
        # What the ranks claim is compared as what they call is: by the fingerprint of the description.
        description = f"{self._description}; {words.claim}" if words.claim else self._description
        try:
            self._engine.run_steps(description, between)
        except CollectiveMismatch as error:
            if words.claim and not words.batches:  # known by size
                error.args = (f"{error.args[0]} {ADVICE}", *error.args[1:])
            self._num_failed, self._failed_collective = 0, self._engine.recorder.number
            raise
        self._pass += 1
        self._published.clear()
        self._reduced.clear()
        if self._num_failed:
            self._num_failed = self._failed_collective = 0
            self._description = self._describe()
        return by_rank

    def restart(self) -> None:
        """Forget what was filled and published: there will be no `finish`. Local. See [Note: failed passes]."""
        for kept in self._kept:
            kept.clear()
        self._published.clear()
        self._reduced.clear()
        self._num_failed += 1
        self._description = self._describe()

    def _reduce_rest(self) -> None:
        for bucket in range(len(self._plans)):
            if bucket not in self._reduced:
                self._reduce(bucket)

    def _describe(self) -> str:
        sizes = [describe_tensor(part[self._rank]) for part in self._parts]
        if len(sizes) > 8:
            sizes[8:] = [f"… {fingerprint(str(sizes)):x}"]  # the rest counts too, in short
        failed = ""
        if self._num_failed:
            failed = f"; {self._num_failed} backward passes failed since "
            failed += f"collective #{self._failed_collective}" if self._failed_collective else "the last averaging"
        return f"DistributedDataParallel's gradient averaging({len(self._plans)} buckets: {', '.join(sizes)}{failed})"


# Where one rank comes with other buffers than before, and the others do not, the mismatch shows this.
_BUFFERS = (
    "DistributedDataParallel's buffers, whose sizes have changed (where each rank has buffers of its own, such as a "
    "table that grows with its longest sample, pass broadcast_buffers=False)"
)


class _BufferMail:
    """Memory through which the first rank's buffers reach the others. Collective to make."""

    def __init__(self, engine: Engine, rank: int, buffers: Sequence[torch.Tensor]) -> None:
        self._is_source = rank == 0
        self._buffers = list(buffers)
        self._shapes = [buffer.shape for buffer in buffers]
        self._has_dtypes = True
        offsets, total = [], 0
        for buffer in buffers:
            offsets.append(total)
            total += -(-buffer.nbytes // _LINE_BYTES) * _LINE_BYTES
        source = engine.allocate(max(total, 1), _BUFFERS).parts[0]
        self._views = [
            source[offset : offset + buffer.nbytes].view(buffer.dtype).view(buffer.shape)
            for offset, buffer in zip(offsets, buffers, strict=True)
        ]

    def fits(self, buffers: Sequence[torch.Tensor]) -> bool:
        """Whether these have the shapes and dtypes of those it was made for. Local."""
        # Of the same tensors too: observers of quantization resize theirs in place.
        if [buffer.shape for buffer in buffers] != self._shapes:
            return False
        if not all(map(operator.is_, buffers, self._buffers)):
            self._buffers = list(buffers)
            self._has_dtypes = [buffer.dtype for buffer in buffers] == [view.dtype for view in self._views]
        return self._has_dtypes

    def write(self, buffers: Sequence[torch.Tensor]) -> None:
        """The first rank puts its buffers in. Local."""
        if self._is_source:
            with torch.no_grad():
                foreach_copy_(self._views, list(buffers))

    def read(self, buffers: Sequence[torch.Tensor]) -> None:
        """The others take them out. Local; after a step that follows `write`."""
        if not self._is_source:
            # Through .data: what autograd has saved for a second backward pass may be overwritten.
            foreach_copy_([buffer.data for buffer in buffers], self._views)
