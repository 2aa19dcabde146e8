"""Which batch a tensor came with.

[Note: tags] A tag is kept beside the tensor, under its storage: views share it (`x[:, 1:]`, `x.view(…)`,
`x.detach()`), and it is gone when the memory is. A weak reference to a storage keeps the address from being given to
another one, so a tag never says a wrong thing about a new tensor. Memory that comes again with another share (a dataset
that hands out views of one large tensor, a buffer that a collate function fills anew) tells nothing, and counts
as untagged.

[Note: holes] A weak reference keeps a hundred bytes of a storage whose memory is gone. These often lie at the edge of
what a batch before had, so that the next batch does not fit in there, and the heap grows by a batch each time: by 270
MB within 32 batches of 9 MB. So tags of tensors that are gone go before the next batch is made, where there are few
tags, and else when there are as many of them as of others.
"""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.batch.share import BatchShare
from lockstep.tree import tensors_in

__all__ = ["Tag", "are_any", "find_tag", "is_filler", "purge", "reset", "tag_batch"]


class Tag(NamedTuple):
    """What a tensor was when the loader yielded it.

    Attributes:
        share: of the batch.
        rows: size of its first dimension; 0 for a scalar.
        stride: of its first dimension, in elements; 0 for a scalar.
        numel: number of its elements.
    """

    share: BatchShare
    rows: int
    stride: int
    numel: int


# By storage; None for memory that came with several shares. What is gone stays until the next purge.
_tags: dict[StorageWeakRef, Tag | None] = {}
_lock = threading.Lock()  # loaders may run in threads of their own
_FEW = 4
_purge_at = _FEW  # see [Note: holes]


def tag_batch(batch: Any, share: BatchShare) -> list[StorageWeakRef]:
    """Tag every tensor in `batch`, whatever it is made of. Local.

    Returns:
        Weak references to the memory of the tensors.
    """
    storages = []
    with _lock:
        for tensor in tensors_in(batch):
            storage = _storage_of(tensor)
            if storage is None or (tensor.is_nested and tensor.layout is torch.strided):  # the latter has no shape
                continue
            has_rows = tensor.dim() > 0
            tag = Tag(share, tensor.shape[0], tensor.stride(0), tensor.numel()) if has_rows else Tag(share, 0, 0, 1)
            other = _tags.setdefault(storage, tag)
            if other is not tag:
                _tags[storage] = tag if other is not None and other.share == share else None
            storages.append(storage)
    if len(_tags) > _purge_at:
        purge()
    return storages


def purge(at_most: float = math.inf) -> None:
    """Forget the tags of tensors that are gone, and with them the loaders of which nothing else is left. Local.

    Args:
        at_most: do nothing if there are more tags than that: it takes a while for each.
    """
    global _purge_at
    if not 0 < len(_tags) <= at_most:
        return
    with _lock:
        for gone in [each for each in _tags if each.expired()]:  # type: ignore[no-untyped-call]
            del _tags[gone]
        _purge_at = 2 * len(_tags) + _FEW


def reset() -> None:
    """Forget all tags. Local."""
    with _lock:
        _tags.clear()


def are_any() -> bool:
    """Whether any tensor has a tag. Local."""
    return bool(_tags)


def find_tag(tensor: torch.Tensor) -> Tag | None:
    """The tag of the memory in which `tensor` lies; None where it has none. Local."""
    if not _tags:
        return None
    storage = _storage_of(tensor)
    return None if storage is None else _tags.get(storage)


def is_filler(batch: Any) -> bool:
    """Whether `batch`, yielded by a `lockstep.DataLoader`, is a filler, and repeats samples of other ranks. Local.

    While training, a rank for which a global batch has no sample gets one. Engine, metrics and losses of Lockstep
    give it weight zero; code that counts samples by hand must leave it out. Tensors that were computed
    from a batch are not known: ask of what the loader yielded.

        >>> from lockstep.data import DataLoader
        >>> [is_filler(batch) for batch in DataLoader(range(5), batch_size=4, rank=1, world_size=2)]
        [False, True]
    """
    tags = [find_tag(tensor) for tensor in tensors_in(batch)]
    return any(tag is not None and tag.share.local_samples == 0 for tag in tags)


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):  # sparse, nested, a wrapper of torch.func
        return None
