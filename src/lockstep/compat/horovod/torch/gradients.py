"""Reduction of an optimizer's gradients.

[Note: held back] Horovod starts to reduce a gradient as soon as it is computed. On a CPU the reduction then takes time
from the backward pass, and a request per parameter costs more than reducing a small one. So gradients on
the CPU of a host that communicates through shared memory are held back, and submitted as one request: when this rank
waits for anything and all are complete, or otherwise in `synchronize`. Dense ones, averaged without compression, are in
the buckets of Lockstep's DDP engine, which copies them once or not at all. GPUs and networks work in parallel with the
CPU: there each gradient is its own request, made as soon as it is complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.backend import engine_of
from lockstep.comm.engine import Engine
from lockstep.compat.horovod.torch.channel import Channel
from lockstep.compat.horovod.torch.compression import Compressor
from lockstep.compat.horovod.torch.meta import Meta, tensor_facts
from lockstep.compat.horovod.torch.mpi_ops.handles import Pending
from lockstep.compat.horovod.torch.mpi_ops.reductions import ReductionOp
from lockstep.compat.horovod.torch.mpi_ops.sparse import sparse_allreduce_async
from lockstep.compat.horovod.torch.process_sets import ProcessSet
from lockstep.compat.horovod.torch.request import Request
from lockstep.parallel.buckets import BucketPlan, plan_buckets
from lockstep.parallel.symmetric import SymmetricTransport
from lockstep.torch_private.autograd import version_of

__all__ = ["Buckets", "ReductionSettings", "reduce_dense", "reduce_sparse"]

# As in lockstep.DistributedDataParallel.
_BUCKET_BYTES = 25 << 20
_FIRST_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True)
class ReductionSettings:
    """How an optimizer's gradients are reduced.

    Attributes:
        compression: compressor of gradients.
        op: Average, Sum or Adasum.
        predivide_factor: divides gradients before the sum, and multiplies the average after it.
        process_set: the ranks that take part.
    """

    compression: type[Compressor]
    op: ReductionOp
    predivide_factor: float
    process_set: ProcessSet


def _write_back(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copy `value` to the gradient, which stays the same object, because users may keep references to it."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        parameter.grad = value if value.is_sparse else value.to_sparse()
    elif gradient.data_ptr() != value.data_ptr():
        gradient.copy_(value)


def reduce_dense(
    channel: Channel, names: Sequence[str], parameters: Sequence[torch.Tensor], settings: ReductionSettings
) -> Callable[[], None]:
    """Submit the gradients of some parameters as one request.

    Args:
        channel: channel of the process set.
        names: name of each parameter.
        parameters: parameters with gradients; sparse gradients are sent as dense ones.
        settings: how gradients are reduced.

    Returns:
        A function that waits, and then writes the results to `.grad`.
    """
    compressed, contexts = [], []
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        tensor, context = settings.compression.compress(dense.detach().contiguous())
        compressed.append(tensor)
        contexts.append(context)
    factor = settings.predivide_factor
    meta = Meta(
        _bulk_name(names),
        "allreduce",
        tuple(map(tensor_facts, compressed)),
        settings.op.name,
        1.0 / factor,
        factor,
        labels=tuple(names),
    )
    pending = Pending(channel, Request(meta, compressed, compressed, is_single=False))

    def finish() -> None:
        with torch.no_grad():
            for parameter, tensor, context in zip(parameters, pending.wait(), contexts, strict=True):
                _write_back(parameter, settings.compression.decompress(tensor, context))

    return finish


def _bulk_name(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"allreduce.{names[0]}"
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=6).hexdigest()
    return f"allreduce.{names[0]} and {len(names) - 1} more ({digest})"


def reduce_sparse(name: str, parameter: torch.Tensor, settings: ReductionSettings) -> Callable[[], None]:
    """Submit a sparse gradient, as its entries. See `reduce_dense`."""
    gradient = parameter.grad
    assert gradient is not None
    finish_entries = sparse_allreduce_async(gradient.detach(), name, settings.op, settings.process_set)

    def finish() -> None:
        parameter.grad = finish_entries()

    return finish


class _Averaging(SymmetricTransport):
    """The DDP engine's buckets, averaged in one collective with its own label.

    Nothing is reduced before all ranks arrive, so nothing has changed if they call different operations.

    Args:
        plans: the buckets.
        engine: engine of a group whose ranks share memory.
        key: must be equal on all ranks for the collective to run.
    """

    def __init__(self, plans: Sequence[BucketPlan], engine: Engine, key: object) -> None:
        super().__init__(plans, engine)
        self._key = key

    def average(self) -> None:
        """Average all buckets, which must be filled. Collective.

        Raises:
            CollectiveMismatch: on all ranks, if one calls another operation; no gradient was changed.
        """
        text = f"DistributedOptimizer's gradient averaging({len(self._plans)} buckets)"
        self._engine.run_steps(text, self._reduce_rest, self._key)
        self._reduced.clear()

    def forget(self, bucket: int) -> None:
        """Release the gradients of a bucket that were not copied. Local."""
        self._kept[bucket].clear()


class Buckets:
    """Gradients in the DDP engine's buckets. Constructed locally; buckets are created in the first round.

    After that, a bucket is filled as soon as its gradients are complete, while they are in the caches; that frees
    memory for later ones. Gradients in a bucket are `.grad`, and may still be changed or replaced.

    Args:
        names: name of each parameter.
        parameters: the parameters, all on the CPU.
        channel: channel of the process set, on a lockstep group.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor], channel: Channel) -> None:
        self._parameters = list(parameters)
        self.channel = channel
        self._plans: list[BucketPlan] = plan_buckets(self._parameters, _BUCKET_BYTES, _FIRST_BUCKET_BYTES)
        self._transport: _Averaging | None = None
        self._views: list[torch.Tensor] = []
        # For each bucket: offset and index of each parameter.
        self._members = [[(placement.offset, placement.index) for placement in plan.placements] for plan in self._plans]
        self._bucket_of = {index: bucket for bucket, members in enumerate(self._members) for _, index in members}
        self._sizes = [len(members) for members in self._members]
        self._missing = list(self._sizes)  # number of missing gradients in this pass, per bucket
        self._num_filled = 0  # number of filled buckets, in this pass
        # Gradients that are not, or not entirely, in their bucket: index -> tensor and its version.
        self._left: dict[int, tuple[torch.Tensor, int]] = {}
        self._dtypes = [parameter.dtype for parameter in parameters]
        self._meta = Meta(
            _bulk_name(names),
            "allreduce",
            tuple(map(tensor_facts, self._parameters)),
            ReductionOp.Average.name,
            labels=tuple(names),
            fused=True,
        )

    # ---- filling -----------------------------------------------------------------------------------

    def arrive(self, index: int) -> None:
        """Note that a parameter's gradient is complete. Local; in the backward pass."""
        bucket = self._bucket_of[index]
        missing = self._missing[bucket] = self._missing[bucket] - 1
        if missing == 0 and self._transport is not None:
            gradients = [self._parameters[member].grad for _, member in self._members[bucket]]
            if all(map(self._can_take, gradients, (member for _, member in self._members[bucket]))):
                self._fill(bucket)
                self._num_filled += 1

    def _can_take(self, gradient: torch.Tensor | None, index: int) -> bool:
        return (
            gradient is not None
            and gradient.layout is torch.strided
            and gradient.dtype is self._dtypes[index]
            and not gradient.requires_grad
        )

    def _fill(self, bucket: int) -> None:
        """Copy the gradients of a bucket to their views, unless they are there. Local."""
        transport = self._transport
        assert transport is not None
        transport.forget(bucket)
        moves: list[tuple[int, torch.Tensor, torch.Tensor, int]] = []
        for offset, index in self._members[bucket]:
            self._left.pop(index, None)
            gradient, view = self._parameters[index].grad, self._views[index]
            assert gradient is not None
            if gradient is not view:
                moves.append((offset, view, gradient, index))
        if not moves:
            return
        offsets, views, gradients, indices = zip(*moves, strict=True)
        with torch.no_grad():
            left = transport.fill(bucket, offsets, views, gradients)
        for view, index in zip(views, indices, strict=True):
            self._parameters[index].grad = view
        for position in left:
            index, gradient = indices[position], gradients[position]
            self._parameters[index].grad = gradient
            self._left[index] = (gradient, version_of(gradient))

    def _is_in_place(self, index: int) -> bool:
        """Whether a gradient is where it was copied from or to, and was not changed since. Local."""
        gradient = self._parameters[index].grad
        if gradient is self._views[index]:
            return index not in self._left
        left = self._left.get(index)
        return left is not None and left[0] is gradient and version_of(gradient) == left[1]

    # ---- averaging ---------------------------------------------------------------------------------

    def submit(self) -> Pending | None:
        """Request the average of all gradients, if the buckets can take them all. Local."""
        are_filled = self._num_filled == len(self._members)
        self._missing[:] = self._sizes
        self._num_filled = 0
        if not are_filled and not all(map(self._can_take, self._gradients(), range(len(self._parameters)))):
            return None
        request = Request(
            self._meta,
            is_single=False,
            run_fused=self._run,
            unfuse=self._gradients,
            is_ready=self._transport is not None,
        )
        return Pending(self.channel, request)

    def _gradients(self) -> list[Any]:
        """The current gradients."""
        return [parameter.grad for parameter in self._parameters]

    def _run(self) -> None:
        """Average the buckets. Collective; in a round."""
        if self._transport is None:
            self._make_transport()
        transport = self._transport
        assert transport is not None
        if self._left or any(p.grad is not view for p, view in zip(self._parameters, self._views, strict=True)):
            for bucket, members in enumerate(self._members):
                if not all(self._is_in_place(index) for _, index in members):
                    self._fill(bucket)
        transport.average()
        for bucket in range(len(self._members)):
            transport.forget(bucket)
        for index in self._left:
            self._parameters[index].grad = self._views[index]
        self._left.clear()

    def _make_transport(self) -> None:
        engine = engine_of(self.channel.control)
        assert engine is not None
        transport = self._transport = _Averaging(self._plans, engine, self._meta.signature)
        self._views = [torch.empty(0, device="cpu")] * len(self._parameters)
        for bucket, members in enumerate(self._members):
            for offset, index in members:
                self._views[index] = transport.view(bucket, offset, self._parameters[index])
            self.channel.add_symmetric(transport.buffer(bucket))
