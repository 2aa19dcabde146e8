"""The `.grad` tensors as views of buckets; a step leaves the old memory to user code that still holds it.

[Note: kept gradients] What the engine gives out as `.grad` is a view of a bucket, which the next backward pass
overwrites. Copying every gradient out costs time, and nearly nobody needs it: the loop sets `.grad` to None, and the
view is free. Code that has kept the tensor, or a view, an array or a graph made from it, keeps its content: before a
bucket is filled, references to its views are counted. If there are more than the engine's own, the old memory stays
with that code, and the bucket goes on in new memory. Gradients of a parameter that this has happened to have
memory of their own from then on, so it happens once, and costs one copy in each later step, for that parameter on that
rank. `gradient_as_bucket_view=True` asks for views in any case, as in torch.

A `.grad` that was there before the backward pass, and that somebody else holds (a flat buffer, a tensor that the
user has put there), gets the mean written into it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch

from lockstep.parallel.buckets import BucketPlan
from lockstep.parallel.transports import Transport
from lockstep.torch_private.tensors import can_count_references, storage_key, storage_use_count, use_count

__all__ = ["GradientViews", "find_held"]

_Counts = tuple[list[int], list[int], list[int]]


class GradientViews:
    """A view of its bucket for each parameter. Local.

    Args:
        transport: owns the memory of the buckets.
        plans: which parameters lie in each bucket, and where.
        parameters: by the indices of the plans.

    Attributes:
        tensors: the views, by parameter.
        of_bucket: for each bucket, the views of its members.
        can_renew: whether references can be counted, and buckets can go on in new memory.
    """

    def __init__(
        self, transport: Transport, plans: Sequence[BucketPlan], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        self._transport = transport
        self._plans = plans
        self._parameters = parameters
        self.can_renew = can_count_references and transport.can_renew
        self.tensors: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(parameters)
        self.of_bucket: list[list[torch.Tensor]] = [[] for _ in plans]
        self._storages: list[list[int]] = [[] for _ in plans]
        self._counts: list[_Counts] = [([], [], [])] * len(plans)
        for bucket in range(len(plans)):
            self._make(bucket)

    def _make(self, bucket: int) -> None:
        placements = self._plans[bucket].placements
        for placement in placements:
            self.tensors[placement.index] = self._transport.view(
                bucket, placement.offset, self._parameters[placement.index]
            )
        self.of_bucket[bucket] = [self.tensors[placement.index] for placement in placements]
        if self.can_renew:
            self._storages[bucket] = list(map(storage_key, self.of_bucket[bucket]))
            # With nobody's references but the engine's own.
            self._counts[bucket] = _count(self.of_bucket[bucket], self._storages[bucket])

    def held(self, bucket: int) -> list[int]:
        """Parameters whose view somebody holds although it is not their `.grad` any more."""
        if not self.can_renew or not self._plans[bucket].numel:
            return []
        now, before = _count(self.of_bucket[bucket], self._storages[bucket]), self._counts[bucket]
        if now == before:
            return []
        differs = [one != other for one, other in zip(zip(*now, strict=True), zip(*before, strict=True), strict=True)]
        suspects = [
            placement.index
            for placement, is_more in zip(self._plans[bucket].placements, differs, strict=True)
            if is_more
        ]
        return [index for index in suspects if self._parameters[index].grad is not self.tensors[index]]

    def renew(self, bucket: int) -> None:
        """Leave the bucket's memory to those who hold views of it, and go on in other memory."""
        self._transport.renew(bucket)
        self._make(bucket)


def find_held(gradients: list[torch.Tensor]) -> list[bool]:
    """Which tensors somebody holds besides the parameter whose `.grad` it is, and this list. Local."""
    if not can_count_references:
        return [True] * len(gradients)
    return [references != _UNHELD for references in zip(*_count(gradients, map(storage_key, gradients)), strict=True)]


def _count(tensors: list[torch.Tensor], storages: Iterable[int]) -> _Counts:
    return list(map(sys.getrefcount, tensors)), list(map(use_count, tensors)), list(map(storage_use_count, storages))


def _count_unheld() -> tuple[int, ...]:
    parameter = torch.nn.Parameter(torch.zeros((), device="cpu"))
    parameter.grad = torch.zeros((), device="cpu")
    gradients = [each.grad for each in (parameter,) if each.grad is not None]
    return tuple(one for (one,) in _count(gradients, map(storage_key, gradients)))


_UNHELD = _count_unheld() if can_count_references else ()
