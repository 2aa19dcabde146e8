"""Layout of gradients in buckets; no communication.

Gradients arrive in about the reverse of the order in which parameters were registered, so
buckets are filled in that order: the first bucket is complete first and can be reduced while the rest
of the backward pass runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.utils.dlpack import from_dlpack

from lockstep.errors import InputError
from lockstep.torch_private.tensors import foreach_copy_

__all__ = ["BucketPlan", "Placement", "copy_all", "plan_buckets", "view_like"]

# Gradients start at whole cache lines, so that no two ranks ever write one line.
_ALIGNMENT_BYTES = 64
_Kind = tuple[torch.dtype, torch.device, bool]  # parameters of one kind may share a bucket


@dataclass(frozen=True)
class Placement:
    """Position of one parameter's gradient in its bucket.

    Attributes:
        index: index of the parameter in the planned list.
        offset: position of its first element in the bucket.
        numel: number of elements.
    """

    index: int
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketPlan:
    """One bucket.

    Attributes:
        placements: its parameters in the expected order of their gradients.
        numel: number of elements in the bucket, including padding.
        dtype: dtype of its gradients.
        device: device of its gradients.
    """

    placements: tuple[Placement, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Size of the bucket in bytes."""
        return self.numel * self.dtype.itemsize

    def gaps(self) -> torch.Tensor:
        """The positions of elements that belong to no gradient."""
        is_gap = torch.ones(self.numel, dtype=torch.bool, device=self.device)
        for placement in self.placements:
            is_gap[placement.offset : placement.offset + placement.numel] = False
        return is_gap.nonzero().flatten()


def plan_buckets(
    parameters: Sequence[torch.Tensor],
    cap_bytes: int,
    first_cap_bytes: int,
    left_out: Collection[int] = (),
    apart: Collection[int] = (),
) -> list[BucketPlan]:
    """Assign parameters to buckets.

    Args:
        parameters: in order of registration.
        cap_bytes: a bucket is closed once it holds at least this much; a larger gradient gets its own bucket.
        first_cap_bytes: the same for the first bucket of each dtype, smaller so that the first reduction starts early.
        left_out: indices of parameters that go into no bucket.
        apart: indices of parameters that do not share a bucket with others.

    Returns:
        Buckets in the expected order of completion.

    >>> plans = plan_buckets([torch.empty(4), torch.empty(100)], cap_bytes=1 << 20, first_cap_bytes=256)
    >>> [[placement.index for placement in plan.placements] for plan in plans]
    [[1], [0]]
    """
    if cap_bytes < 1 or first_cap_bytes < 1:
        raise InputError(f"bucket sizes must be at least one byte, got {cap_bytes} and {first_cap_bytes}")
    open_buckets: dict[_Kind, list[Placement]] = {}
    sizes: dict[_Kind, int] = {}
    closed: list[BucketPlan] = []
    seen: set[_Kind] = set()

    def close(key: _Kind) -> None:
        dtype, device, _ = key
        closed.append(BucketPlan(tuple(open_buckets.pop(key)), sizes.pop(key), dtype, device))
        seen.add(key)

    for index in reversed(range(len(parameters))):
        if index in left_out:
            continue
        parameter = parameters[index]
        key = (parameter.dtype, parameter.device, index in apart)
        alignment = max(1, _ALIGNMENT_BYTES // parameter.dtype.itemsize)
        offset = sizes.get(key, 0)
        open_buckets.setdefault(key, []).append(Placement(index, offset, parameter.numel()))
        sizes[key] = -(-(offset + parameter.numel()) // alignment) * alignment
        cap = cap_bytes if key in seen else first_cap_bytes
        if sizes[key] * parameter.dtype.itemsize >= cap:
            close(key)
    for key in list(open_buckets):
        close(key)
    return closed


def view_like(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`flat`, of shape (numel,), in the shape of `like` and, if that is dense, with its strides.

    It has its own storage, as large as the view, so that `torch.save` and `copy.deepcopy` copy no more than that, and
    references to it can be counted; and its own version counter.
    """
    memory = from_dlpack(flat.view(torch.uint8))
    if memory.device == flat.device:  # not in a rehearsal, where only tensors made by operations appear to be on a GPU
        flat = memory.view(flat.dtype)
    dense = torch.empty_like(like, device="meta")
    return flat.as_strided(like.shape, dense.stride(), flat.storage_offset()).data


def copy_all(views: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Copy each of `gradients` to its view of a bucket."""
    if views:
        foreach_copy_(list(views), list(gradients))
