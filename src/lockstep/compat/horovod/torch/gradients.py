"""The gradients of one optimizer on their way to being reduced.

[Note: held back] Horovod starts to reduce a gradient as soon as it is there. On a CPU that takes from the backward pass
what it gives to the reduction, and a request for each parameter costs more than reducing a small one. So gradients on
the CPU of a host that communicates through shared memory are held back, and go as one request: when this rank waits
for anything, if all are complete, or else in `synchronize`. Dense ones that are averaged as they are lie in the
buckets of Lockstep's own DDP engine, which moves them once or not at all. GPUs and networks work beside the processor:
there each gradient is a request of its own, made as soon as it is complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.backend import LockstepProcessGroup
from lockstep.compat.horovod.torch.channel import Channel
from lockstep.compat.horovod.torch.compression import Compressor
from lockstep.compat.horovod.torch.meta import Meta, tensor_facts
from lockstep.compat.horovod.torch.mpi_ops.handles import Pending
from lockstep.compat.horovod.torch.mpi_ops.reductions import ReductionOp, sparse_allreduce_async
from lockstep.compat.horovod.torch.process_sets import ProcessSet
from lockstep.compat.horovod.torch.request import Request
from lockstep.parallel.buckets import BucketPlan, plan_buckets
from lockstep.parallel.symmetric import SymmetricTransport

__all__ = ["Buckets", "Settings", "reduce_dense", "reduce_sparse"]

# Those of lockstep.DistributedDataParallel.
_BUCKET_BYTES = 25 << 20
_FIRST_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True)
class Settings:
    """How an optimizer's gradients are reduced.

    Attributes:
        compression: what travels.
        op: Average, Sum or Adasum.
        predivide_factor: divides before the sum what the average then multiplies by after it.
        process_set: who takes part.
    """

    compression: type[Compressor]
    op: ReductionOp
    predivide_factor: float
    process_set: ProcessSet


def _write_back(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Make `value` the gradient; the gradient tensor stays the same object, as Horovod's users may hold on to it."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        parameter.grad = value if value.is_sparse else value.to_sparse()
    elif gradient.data_ptr() != value.data_ptr():
        gradient.copy_(value)


def reduce_dense(
    channel: Channel, names: Sequence[str], parameters: Sequence[torch.Tensor], settings: Settings
) -> Callable[[], None]:
    """Submit the gradients of some parameters as one request.

    Args:
        channel: of the process set.
        names: of the parameters.
        parameters: with gradients; a sparse gradient travels as a dense one.
        settings: how to reduce.

    Returns:
        A function that waits, and then leaves the results in `.grad`.
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
    pending = Pending(channel, channel.submit(Request(meta, compressed, compressed, is_single=False)))

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


def reduce_sparse(name: str, parameter: torch.Tensor, settings: Settings) -> Callable[[], None]:
    """Submit one sparse gradient, by its entries. See `reduce_dense`."""
    gradient = parameter.grad
    assert gradient is not None
    finish_entries = sparse_allreduce_async(gradient.detach(), name, settings.op, settings.process_set)

    def finish() -> None:
        parameter.grad = finish_entries()

    return finish


class _Averaging(SymmetricTransport):
    """The DDP engine's buckets, averaged in one collective that says whose they are.

    Nothing is reduced before the ranks have met, so nothing is left behind if they turn out to want different things.

    Args:
        plans: the buckets.
        group: a lockstep group.
        key: decides, with all ranks, whether they want the same.
    """

    def __init__(self, plans: Sequence[BucketPlan], group: LockstepProcessGroup, key: object) -> None:
        super().__init__(plans, group)
        self._key = key

    def average(self) -> None:
        """Average all buckets, which have been filled. Collective.

        Raises:
            CollectiveMismatch: on all ranks, if one wants something else; no gradient was changed.
        """
        try:
            text = f"DistributedOptimizer's gradient averaging({len(self._plans)} buckets)"
            self._engine.run_steps(self._key, lambda: text, self._reduce_rest)
        finally:
            for kept in self._kept:
                kept.clear()
            self._reduced.clear()


class Buckets:
    """Gradients in the DDP engine's buckets. Local to make; the buckets come into being in the first round.

    Args:
        names: of the parameters.
        parameters: all on the CPU.
        channel: of the process set, over a lockstep group.

    Attributes:
        channel: the same.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor], channel: Channel) -> None:
        self._parameters = list(parameters)
        self.channel = channel
        self._plans: list[BucketPlan] = plan_buckets(self._parameters, _BUCKET_BYTES, _FIRST_BUCKET_BYTES)
        self._transport: _Averaging | None = None
        self._views: list[torch.Tensor] = []
        # For each bucket: offset, place, and number of the parameter.
        self._contents: list[list[tuple[int, torch.Tensor, int]]] = []
        self._dtypes = [parameter.dtype for parameter in parameters]
        self._meta = Meta(
            _bulk_name(names),
            "allreduce",
            tuple(map(tensor_facts, self._parameters)),
            ReductionOp.Average.name,
            labels=tuple(names),
            fused=True,
        )

    def submit(self) -> Pending | None:
        """Ask for the average of all gradients, if all are there, dense, and of their parameter's dtype. Local."""
        gradients: list[Any] = [parameter.grad for parameter in self._parameters]
        for gradient, dtype in zip(gradients, self._dtypes, strict=True):
            if gradient is None or gradient.layout is not torch.strided or gradient.dtype is not dtype:
                return None
        # Where a rank has joined, they are reduced where they are.
        request = Request(
            self._meta,
            gradients,
            gradients,
            is_single=False,
            run_fused=lambda: self._run(gradients),
            is_ready=self._transport is not None,
        )
        return Pending(self.channel, self.channel.submit(request))

    def _run(self, gradients: Sequence[torch.Tensor]) -> None:
        """Average. Collective; in a round."""
        transport = self._transport if self._transport is not None else self._make_transport()
        for bucket, content in enumerate(self._contents):
            moves = [
                (offset, place, gradients[index]) for offset, place, index in content if gradients[index] is not place
            ]
            if moves:
                transport.fill(bucket, *zip(*moves, strict=True))
        transport.average()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def _make_transport(self) -> _Averaging:
        group = self.channel.control
        assert isinstance(group, LockstepProcessGroup)
        transport = self._transport = _Averaging(self._plans, group, self._meta.signature)
        self._views = [torch.empty(0)] * len(self._parameters)
        for bucket, plan in enumerate(self._plans):
            for placement in plan.placements:
                like = self._parameters[placement.index]
                self._views[placement.index] = transport.view(bucket, placement.offset, like)
            self._contents.append([(place.offset, self._views[place.index], place.index) for place in plan.placements])
        return transport
