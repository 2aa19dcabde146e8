"""Runs requests that all ranks of a process set have agreed on, over the set's c10d groups.

All ranks pass the same requests in the same order; every decision depends only on what all ranks know of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from lockstep.comm.backend import engine_of
from lockstep.compat.horovod.torch import adasum
from lockstep.compat.horovod.torch.meta import Meta
from lockstep.compat.horovod.torch.request import Request
from lockstep.torch_private.tensors import foreach_copy_

__all__ = ["Executor", "Match", "gather_equal", "scale"]

# Smaller tensors of a reduction are fused; larger ones are reduced in place, which saves two copies.
_FUSE_BYTES = 128 << 10
_OPS = {
    "Average": ReduceOp.SUM,
    "Sum": ReduceOp.SUM,
    "Min": ReduceOp.MIN,
    "Max": ReduceOp.MAX,
    "Product": ReduceOp.PRODUCT,
}


@dataclass(frozen=True)
class Match:
    """A request that every rank of the set has made, except for ranks that have joined.

    Attributes:
        request: this rank's request; None if it has joined.
        metas: rank in the set -> its request; without ranks that have joined.
    """

    request: Request | None
    metas: dict[int, Meta]

    @property
    def meta(self) -> Meta:
        """The metadata that all ranks agree on."""
        return next(iter(self.metas.values()))


def scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place: integers in float64, rounded towards zero; 16-bit floats in float32. Local.

    >>> numbers = torch.tensor([-3, 3])
    >>> scale(numbers, 0.5)
    >>> numbers.tolist()
    [-1, 1]
    """
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).to(tensor.dtype))


def gather_equal(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Concatenate the ranks' tensors, which have the same size. Collective."""
    engine = engine_of(group)
    if engine is not None:
        # As in torch, without its logging decorators, which take longer than the operation.
        rows = list(output.view(group.size(), -1).unbind(0))
        engine.all_gather([rows], [tensor], is_async=False, timeout_s=None)
    else:
        # Renamed in torch 2.13, where the old name warns.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(output, tensor, group=group)


class Executor:
    """Runs matched requests of a process set.

    Args:
        ranks: global ranks of the set.
        rank: rank of this process in the set.
        control: the set's group for CPU tensors.
        accelerator: the set's group for tensors on GPUs, or None.
        hosts: global ranks of each host; for Adasum, which is supported by the set of all ranks only.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        control: dist.ProcessGroup,
        accelerator: dist.ProcessGroup | None,
        hosts: Sequence[Sequence[int]],
    ) -> None:
        self._ranks = ranks
        self._hosts = hosts
        self._rank = rank
        self._control = control
        self._accelerator = accelerator
        self._symmetric: list[tuple[int, int]] = []  # addresses

    def add_symmetric(self, memory: torch.Tensor) -> None:
        """Reduce tensors in this memory like any others. Local.

        The group would reduce them as symmetric memory, which requires that they are there on all ranks.
        """
        start = memory.data_ptr()
        self._symmetric.append((start, start + memory.numel() * memory.element_size()))

    def _is_symmetric(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return any(start <= address < end for start, end in self._symmetric)

    def run(self, matches: Sequence[Match]) -> None:
        """Run and complete requests. Collective; the same matches in the same order on all ranks."""
        reductions: list[Match] = []
        with torch.no_grad():
            for match in matches:
                if match.request is not None:
                    match.request.wait_for_inputs()
                if match.meta.kind != "allreduce":
                    self._run_one(match)
                elif match.meta.fused and len(match.metas) == len(self._ranks):
                    assert match.request is not None
                    assert match.request.run_fused is not None
                    match.request.run_fused()
                    match.request.complete()
                else:
                    reductions.append(match)
            if reductions:
                self._all_reduce(reductions)

    def _group_for(self, device_type: str) -> dist.ProcessGroup:
        if device_type == "cpu" or self._accelerator is None:
            return self._control
        return self._accelerator

    # ---- reductions ------------------------------------------------------------------------------

    def _all_reduce(self, matches: Sequence[Match]) -> None:
        alike: dict[tuple[str, str, str], list[torch.Tensor]] = {}
        outputs = [self._contribution(match) for match in matches]
        for match, tensors in zip(matches, outputs, strict=True):
            for (dtype, _, device), tensor in zip(match.meta.tensors, tensors, strict=True):
                alike.setdefault((match.meta.op, dtype, device), []).append(tensor)
        for (op, _, device), tensors in alike.items():
            self._reduce_alike(op, tensors, device)
        for match, tensors in zip(matches, outputs, strict=True):
            for tensor in tensors:
                scale(tensor, match.meta.postscale)
            if match.request is not None:
                assert match.request.outputs is not None
                match.request.complete(match.request.outputs)

    def _contribution(self, match: Match) -> list[torch.Tensor]:
        """The tensors to reduce in place: outputs filled with this rank's scaled inputs, or with zeros."""
        request = match.request
        if request is None:
            return [
                torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
                for dtype, shape, device in match.meta.tensors
            ]
        if request.unfuse is not None:
            request.inputs = request.outputs = request.unfuse()
        assert request.outputs is not None
        tensors = []
        for source, output in zip(request.inputs, request.outputs, strict=True):
            tensor = output.detach()
            if output is not source:
                tensor.copy_(source)
            scale(tensor, match.meta.prescale)
            tensors.append(tensor)
        return tensors

    def _reduce_alike(self, op: str, tensors: Sequence[torch.Tensor], device_type: str) -> None:
        """Reduce tensors of the same dtype and device type in place."""
        group = self._group_for(device_type)
        if op == "Adasum":
            by_host = adasum.combines_hosts(device_type)
            if not by_host or len(self._hosts) > 1:
                for tensor in tensors:
                    if by_host:
                        adasum.reduce_adasum_of_hosts(tensor, self._hosts, self._rank, group)
                    else:
                        adasum.reduce_adasum(tensor, self._ranks, self._rank, group)
                return
            op = "Average"
        small = [tensor for tensor in tensors if tensor.numel() * tensor.element_size() <= _FUSE_BYTES]
        if len(small) < 2:
            self._reduce_each(op, tensors, group)
            return
        large = [tensor for tensor in tensors if tensor.numel() * tensor.element_size() > _FUSE_BYTES]
        device = small[0].device
        flat = torch.cat([tensor.reshape(-1).to(device) for tensor in small])
        self._reduce_each(op, [flat, *large], group)
        pieces = torch.split(flat, [tensor.numel() for tensor in small])
        foreach_copy_(
            small, [piece.view(tensor.shape).to(tensor.device) for piece, tensor in zip(pieces, small, strict=True)]
        )

    def _reduce_each(self, op: str, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        can = _abilities_of(group)
        averages = op == "Average" and can.average and _has_fractions(tensors[0].dtype)
        kind = ReduceOp.AVG if averages else _OPS[op]
        given = tensors
        tensors = [tensor.clone() if self._symmetric and self._is_symmetric(tensor) else tensor for tensor in given]
        works = [dist.all_reduce(tensor, kind, group=group, async_op=not can.run_here) for tensor in tensors]
        for work in works:
            if work is not None:
                work.wait()
        if op == "Average" and not averages:
            for tensor in tensors:
                self._divide(tensor)
        for original, tensor in zip(given, tensors, strict=True):
            if original is not tensor:
                original.copy_(tensor)

    def _divide(self, tensor: torch.Tensor) -> None:
        tensor.div_(len(self._ranks), rounding_mode=None if _has_fractions(tensor.dtype) else "trunc")

    # ---- one request -----------------------------------------------------------------------------

    def _run_one(self, match: Match) -> None:
        request = match.request
        if request is None:
            return  # A joined rank does nothing in a barrier.
        match request.meta.kind:
            case "broadcast":
                self._broadcast(request)
            case "allgather":
                request.complete(
                    [self._all_gather(request, index, match.metas) for index in range(len(request.inputs))]
                )
            case "alltoall":
                self._all_to_all(request, match.metas)
            case "reducescatter":
                outputs = [self._reduce_scatter(request.meta, tensor) for tensor in request.inputs]
                request.complete(outputs)
            case kind:
                assert kind in ("barrier", "process_set"), kind
                request.complete()

    def _broadcast(self, request: Request) -> None:
        assert request.outputs is not None
        for source, output in zip(request.inputs, request.outputs, strict=True):
            tensor = output.detach()
            if self._ranks[self._rank] == request.meta.root and output is not source:
                tensor.copy_(source)
            group = self._group_for(tensor.device.type)
            dist.broadcast(tensor, request.meta.root, group=group)
        request.complete(request.outputs)

    def _all_gather(self, request: Request, index: int, metas: dict[int, Meta]) -> torch.Tensor:
        tensor = request.inputs[index].detach()
        sizes = [metas[rank].tensors[index][1][0] for rank in range(len(self._ranks))]
        rest = tuple(tensor.shape[1:])
        output = tensor.new_empty((sum(sizes), *rest))
        group = self._group_for(tensor.device.type)
        if len(set(sizes)) == 1:
            gather_equal(output, tensor, group)
        elif _abilities_of(group).take_uneven:
            dist.all_gather(list(torch.split(output, sizes)), tensor, group=group)
        else:
            # This group only gathers equal sizes.
            padded = tensor.new_zeros((max(sizes), *rest))
            padded[: tensor.size(0)].copy_(tensor)
            gathered = tensor.new_empty((len(sizes), *padded.shape))
            gather_equal(gathered.view(-1, *rest), padded, group)
            for part, size, target in zip(gathered.unbind(0), sizes, torch.split(output, sizes), strict=True):
                target.copy_(part[:size])
        return output

    def _all_to_all(self, request: Request, metas: dict[int, Meta]) -> None:
        (tensor,) = request.inputs
        tensor = tensor.detach()
        received = [metas[rank].splits[self._rank] for rank in range(len(self._ranks))]
        sent = list(request.meta.splits)
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        group = self._group_for(tensor.device.type)
        dist.all_to_all_single(output, tensor[: sum(sent)], received, sent, group=group)
        request.complete([output], result=(output, received))

    def _reduce_scatter(self, meta: Meta, source: torch.Tensor) -> torch.Tensor:
        group = self._group_for(source.device.type)
        world_size = len(self._ranks)
        rows, extra = divmod(source.size(0), world_size)
        # If rows do not divide evenly, the first ranks get one more.
        sizes = [rows + (rank < extra) for rank in range(world_size)]
        tensor = source.detach()
        if meta.prescale != 1.0:
            tensor = tensor.clone()
            scale(tensor, meta.prescale)
        can = _abilities_of(group)
        if can.reduce_scatter and (can.take_uneven or not extra):
            output = tensor.new_empty((sizes[self._rank], *tensor.shape[1:]))
            averages = meta.op == "Average" and can.average and _has_fractions(tensor.dtype)
            op = ReduceOp.AVG if averages else ReduceOp.SUM
            dist.reduce_scatter(output, list(torch.split(tensor, sizes)), op, group=group)
            if meta.op == "Average" and not averages:
                self._divide(output)
        else:
            # gloo has no reduce_scatter, and NCCL's does not support uneven parts.
            whole = tensor.clone()
            self._reduce_each(meta.op, [whole], group)
            output = torch.split(whole, sizes)[self._rank].clone()
        scale(output, meta.postscale)
        return output


@dataclass(frozen=True)
class _Abilities:
    """The features of a c10d group.

    Attributes:
        average: averages floating-point tensors.
        reduce_scatter: has reduce_scatter.
        take_uneven: gathers and scatters tensors whose sizes differ between ranks.
        run_here: runs in the caller's thread, which then need not wait for another.
    """

    average: bool
    reduce_scatter: bool
    take_uneven: bool
    run_here: bool


_OURS = _Abilities(average=True, reduce_scatter=True, take_uneven=True, run_here=True)
_NCCL = _Abilities(average=True, reduce_scatter=True, take_uneven=False, run_here=False)
_OTHERS = _Abilities(average=False, reduce_scatter=False, take_uneven=False, run_here=False)


def _abilities_of(group: dist.ProcessGroup) -> _Abilities:
    if engine_of(group) is not None:
        return _OURS
    return _NCCL if dist.get_backend(group) == "nccl" else _OTHERS


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
