"""Which batch a tensor belongs to.

[Note: tags] A tag is stored by the address of the tensor's storage: views share it (`x[:, 1:]`, `x.view(…)`,
`x.detach()`), and it expires with the memory. A weak reference to the storage prevents reuse of the address, so a tag
is never wrong about a new tensor. Memory that recurs with another share (a dataset that returns views of one large
tensor, a buffer that a collate function refills) identifies no batch, and counts as untagged.

[Note: holes] A weak reference keeps a hundred bytes of a storage whose memory has been freed. They often lie at the
edge of the freed memory of an earlier batch, so that the next batch does not fit there, and the heap grows by a batch
each time: by 270 MB within 32 batches of 9 MB. So tags of freed tensors are removed before the next batch is made if
there are few tags, and otherwise when they are half of all tags.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.batch.share import BatchShare
from lockstep.errors import InputError
from lockstep.torch_private.tensors import storage_address
from lockstep.tree import tensors_in

__all__ = ["Tag", "are_any", "find_tag", "forget", "is_filler", "purge", "reset", "shares_in_memory", "tag_batch"]


class Tag(NamedTuple):
    """Properties of a tensor when the loader yielded it.

    Attributes:
        share: the batch's share.
        rows: size of its first dimension; 0 for a scalar.
        stride: stride of its first dimension, in elements; 0 for a scalar.
        numel: number of its elements.
        iteration: number of the iteration that yielded it; see `plans.register`.
    """

    share: BatchShare
    rows: int
    stride: int
    numel: int
    iteration: int = 0


# By address of a storage, whose reuse the reference prevents: the tag, or None for memory that came with several
# shares. Expired entries remain until the next purge.
_tags: dict[int, tuple[StorageWeakRef, Tag | None]] = {}
_lock = threading.Lock()  # loaders may run in separate threads
_FEW = 4
_purge_at = _FEW  # see [Note: holes]
_NO_TAG: tuple[None, None] = (None, None)
_MANY = 512  # tags, as in a loop that keeps its batches
# By number of a running iteration: the batch that it yielded last, if that contains no tensors.
_without_tensors: dict[int, tuple[Any, BatchShare]] = {}


def tag_batch(batch: Any, share: BatchShare, iteration: int = 0) -> None:
    """Tag every tensor in `batch`, in any nesting of containers. Local."""
    tensors = tensors_in(batch)
    if not tensors:
        _without_tensors[iteration] = batch, share
    with _lock:
        for tensor in tensors:
            storage = _storage_of(tensor)
            if storage is None or (tensor.is_nested and tensor.layout is torch.strided):  # the latter has no shape
                continue
            rows, stride = (tensor.shape[0], tensor.stride(0)) if tensor.dim() else (0, 0)
            tag: Tag | None = Tag(share, rows, stride, tensor.numel(), iteration)
            address = storage_address(storage)
            before = _tags.get(address)
            if before is None:
                _tags[address] = StorageWeakRef(storage), tag  # type: ignore[no-untyped-call]
                continue
            reference, other = before
            if other is None or other.share is not share:
                _tags[address] = reference, tag if other is not None and other.share == share else None
    if len(_tags) > _purge_at:
        purge()


def purge(at_most: float = math.inf) -> None:
    """Forget the tags of freed tensors, and so the loaders that only these tags kept in use. Local.

    Does nothing if there are more than `at_most` tags, as it takes time for each.
    """
    global _purge_at
    if not 0 < len(_tags) <= at_most:
        return
    with _lock:
        for gone in [address for address, (reference, _) in _tags.items() if reference.expired()]:  # type: ignore[no-untyped-call]
            del _tags[gone]
        _purge_at = 2 * len(_tags) + _FEW


def reset() -> None:
    """Forget all tags. Local."""
    _without_tensors.clear()
    with _lock:
        _tags.clear()


def forget(iteration: int) -> None:
    """Forget the batch without tensors of an iteration that is over. Local."""
    _without_tensors.pop(iteration, None)


def are_any() -> bool:
    """Whether any tensor has a tag. Local."""
    return bool(_tags)


def find_tag(tensor: torch.Tensor) -> Tag | None:
    """The tag of the tensor's memory, or None. Local."""
    if not _tags:
        return None
    storage = _storage_of(tensor)
    return None if storage is None else _tags.get(storage_address(storage), _NO_TAG)[1]


def shares_in_memory(iteration: int) -> list[BatchShare] | None:
    """The shares of an iteration's batches of which any tensor still exists, the latest first. Local.

    Returns:
        None if there are many tags, or if memory came with several shares, so that its current batch is unknown.
    """
    if len(_tags) > _MANY:
        return None
    purge()
    tags = [tag for _, tag in list(_tags.values())]
    found = {id(tag.share): tag.share for tag in tags if tag is not None and tag.iteration == iteration}
    return None if None in tags else list(found.values())[::-1]


def is_filler(batch: Any) -> bool:
    """Whether `batch`, yielded by a `lockstep.DataLoader`, is a filler, which repeats samples of other ranks. Local.

    In training, a rank gets a filler if a global batch has no sample for it. Lockstep's engine, metrics and losses give
    it weight zero; code that counts samples itself must leave it out. Tensors computed from a batch are not recognised:
    pass what the loader yielded, or a part of it.

    Raises:
        InputError: the loader has yielded a filler without tensors, and `batch` has none either and is not part of it.

        >>> from lockstep.data import DataLoader
        >>> [is_filler(batch) for batch in DataLoader(range(5), batch_size=4, rank=1, world_size=2)]
        [False, True]
    """
    tensors = tensors_in(batch)
    if not tensors:
        return _is_filler_without_tensors(batch)
    tags = map(find_tag, tensors)
    return any(tag is not None and tag.share.local_samples == 0 for tag in tags)


def _is_filler_without_tensors(batch: Any) -> bool:
    latest = list(_without_tensors.values())
    for yielded, share in latest:
        values = yielded.values() if isinstance(yielded, Mapping) else yielded
        parts = (yielded, *values) if isinstance(yielded, Mapping | list | tuple) else (yielded,)
        if any(batch is part for part in parts):
            return share.local_samples == 0
    if all(share.local_samples for _, share in latest):
        return False
    raise InputError(
        f"is_filler({type(batch).__name__}): cannot tell, because it has no tensor and is not part of the batch that "
        "the loader yielded last, which is a filler. Pass what the loader yielded"
    )


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, nested, a wrapper of torch.func
        return None
