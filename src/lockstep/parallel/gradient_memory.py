"""Memory of gradients between steps: views of buckets, and memory that glibc keeps.

[Note: kept gradients] The engine sets `.grad` to a view of a bucket, which the next backward pass overwrites. Copying
every gradient out would cost time, and is rarely needed: most loops set `.grad` to None, which releases the view. Code
that has kept the tensor, or a view, an array or a graph made from it, keeps its content: before a bucket is filled,
references to its views are counted. If there are more than the engine's own, the old memory stays with that code, and
the bucket moves to new memory. From then on, gradients of such a parameter have their own memory, so this happens once,
and then costs one copy per step, for that parameter on that rank. With `gradient_as_bucket_view=True` gradients are
always views, as in torch.

If a `.grad` existed before the backward pass and has other references (a flat buffer, a tensor set by the user), the
mean is written into it.

[Note: gradients on the heap] Autograd allocates the gradients of a step, and `zero_grad` frees them. glibc lets the
kernel map large blocks anew each time, or trims its heap, and every page that is mapped again costs a fault: for a
model of 10M parameters four thousand per step, a tenth of its time. So glibc is set to keep the memory of two steps'
gradients. That much more may stay with the process after the model is freed. An older glibc refuses a threshold above
32 MiB, and is set to that; larger blocks are then mapped anew in every step, as by default.

Settings of the user win: MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_, or glibc.malloc in GLIBC_TUNABLES. Other
allocators are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import torch

from lockstep import env, libc
from lockstep.parallel.buckets import BucketPlan
from lockstep.parallel.transports import Transport
from lockstep.torch_private.tensors import can_count_references, storage_key, storage_use_count, use_count

__all__ = ["GradientViews", "can_renew", "find_held", "keep_memory_of_gradients"]

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
    """

    def __init__(
        self, transport: Transport, plans: Sequence[BucketPlan], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        self._transport = transport
        self._plans = plans
        self._parameters = parameters
        self._can_renew = can_renew(transport)
        self.tensors: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(parameters)
        self.of_bucket: list[list[torch.Tensor]] = [[] for _ in plans]
        self._storages: list[list[int]] = [[] for _ in plans]
        # Number of references to the views and their memory if only the engine has any: in total, and for each.
        self._num_references = [0] * len(plans)
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
        if self._can_renew:
            self._storages[bucket] = list(map(storage_key, self.of_bucket[bucket]))
            self._counts[bucket] = _count(self.of_bucket[bucket], self._storages[bucket])
            self._num_references[bucket] = sum(map(sum, self._counts[bucket]))

    def held(self, bucket: int) -> list[int]:
        """Parameters whose view has other references although it is no longer their `.grad`."""
        if not self._can_renew:
            return []
        views, storages = self.of_bucket[bucket], self._storages[bucket]
        # There are never fewer than the engine's own: if the sum is equal, all are.
        num_references = sum(map(sys.getrefcount, views))
        num_references += sum(map(use_count, views)) + sum(map(storage_use_count, storages))
        if num_references == self._num_references[bucket]:
            return []
        now, before = _count(views, storages), self._counts[bucket]
        differs = [one != other for one, other in zip(zip(*now, strict=True), zip(*before, strict=True), strict=True)]
        members = zip(self._plans[bucket].placements, views, differs, strict=True)
        suspects = [(placement.index, view) for placement, view, is_more in members if is_more]
        return [index for index, view in suspects if self._parameters[index].grad is not view]

    def renew(self, bucket: int) -> None:
        """Leave the bucket's memory to the holders of its views, and use new memory."""
        self._transport.renew(bucket)
        self._make(bucket)


def can_renew(transport: Transport) -> bool:
    """Whether references can be counted, and buckets can move to new memory."""
    return can_count_references and transport.can_renew


def find_held(gradients: list[torch.Tensor]) -> list[bool]:
    """Which tensors have references besides the parameter's `.grad` and this list. Local."""
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


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# glibc's own maximum; and a size from which on page faults do not matter.
_SMALLEST_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD = 32 << 20, 1 << 30
# The maximum that older releases of glibc accept: half of one of its heaps.
_OLD_LARGEST_MMAP_THRESHOLD = 32 << 20
_SLACK_BYTES = 1 << 20
_LARGEST_INT = 2**31 - 1

_mallopt: Callable[[int, int], int] | None = libc.function("mallopt")
_told = (0, 0)


def keep_memory_of_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Keep the memory of these parameters' gradients in the process between steps. Local.

    Args:
        parameters: a model's parameters; those not on the CPU are ignored.
    """
    global _told
    sizes = [one.numel() * one.element_size() for one in parameters if one.device.type == "cpu"]
    if not sizes or _mallopt is None or _is_decided():
        return
    piece_bytes = min(max(*sizes, _SMALLEST_MMAP_THRESHOLD) + _SLACK_BYTES, _LARGEST_MMAP_THRESHOLD)
    kept_bytes = min(2 * sum(sizes) + piece_bytes, _LARGEST_INT)
    wanted = max(piece_bytes, _told[0]), max(kept_bytes, _told[1])
    if wanted != _told:
        _told = wanted
        is_accepted = any(_mallopt(_M_MMAP_THRESHOLD, one) for one in (wanted[0], _OLD_LARGEST_MMAP_THRESHOLD))
        # Only a trim threshold would freeze the other one at 128 KiB, which is worse than setting neither.
        if is_accepted:
            _mallopt(_M_TRIM_THRESHOLD, wanted[1])


def _is_decided() -> bool:
    said = (env.MALLOC_MMAP_THRESHOLD_.get(), env.MALLOC_TRIM_THRESHOLD_.get())
    return any(one is not None for one in said) or "glibc.malloc." in (env.GLIBC_TUNABLES.get() or "")
