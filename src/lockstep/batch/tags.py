"""Which batch a tensor came with.

[Note: tags] A tag is kept beside the tensor, under its storage: views share it (`x[:, 1:]`, `x.view(…)`, `x.detach()`),
and it is gone when the memory is. A weak reference to a storage keeps the address from being given to another one, so a
tag never says a wrong thing about a new tensor. Memory that comes again with another share (a dataset that hands out
views of one large tensor, a buffer that a collate function fills anew) tells nothing, and counts as untagged.

[Note: holes] A weak reference keeps a hundred bytes of a storage whose memory is gone. These often lie at the edge of
what a batch before had, so that the next batch does not fit in there, and the heap grows by a batch each time: by 270
MB within 32 batches of 9 MB. So tags of tensors that are gone go before the next batch is made, where there are few
tags, and else when there are as many of them as of others.
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
    """What a tensor was when the loader yielded it.

    Attributes:
        share: of the batch.
        rows: size of its first dimension; 0 for a scalar.
        stride: of its first dimension, in elements; 0 for a scalar.
        numel: number of its elements.
        iteration: number of the one that yielded it; see `plans.register`.
    """

    share: BatchShare
    rows: int
    stride: int
    numel: int
    iteration: int = 0


# By the address of a storage, which the reference keeps from being given to another one: the tag; None for memory that
# came with several shares. What is gone stays until the next purge.
_tags: dict[int, tuple[StorageWeakRef, Tag | None]] = {}
_lock = threading.Lock()  # loaders may run in threads of their own
_FEW = 4
_purge_at = _FEW  # see [Note: holes]
_NO_TAG: tuple[None, None] = (None, None)
_MANY = 512  # tags, as a loop has them that keeps its batches
# By number of an iteration that is under way: the batch that it yielded last, if that holds none.
_without_tensors: dict[int, tuple[Any, BatchShare]] = {}


def tag_batch(batch: Any, share: BatchShare, iteration: int = 0) -> None:
    """Tag every tensor in `batch`, whatever it is made of. Local."""
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
    """Forget the tags of tensors that are gone, and with them the loaders of which nothing else is left. Local.

    Does nothing if there are more tags than `at_most`: it takes a while for each.
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
    """An iteration is over: nobody asks of its batches without tensors any more. Local."""
    _without_tensors.pop(iteration, None)


def are_any() -> bool:
    """Whether any tensor has a tag. Local."""
    return bool(_tags)


def find_tag(tensor: torch.Tensor) -> Tag | None:
    """The tag of the memory in which `tensor` lies; None where it has none. Local."""
    if not _tags:
        return None
    storage = _storage_of(tensor)
    return None if storage is None else _tags.get(storage_address(storage), _NO_TAG)[1]


def shares_in_memory(iteration: int) -> list[BatchShare] | None:
    """The shares of the batches of an iteration of which some tensor exists, the latest first. Local.

    Returns:
        None where they are many, or where memory has come with several shares and nobody knows what it is now.
    """
    if len(_tags) > _MANY:
        return None
    purge()
    tags = [tag for _, tag in list(_tags.values())]
    found = {id(tag.share): tag.share for tag in tags if tag is not None and tag.iteration == iteration}
    return None if None in tags else list(found.values())[::-1]


def is_filler(batch: Any) -> bool:
    """Whether `batch`, yielded by a `lockstep.DataLoader`, is a filler, and repeats samples of other ranks. Local.

    While training, a rank for which a global batch has no sample gets one. Engine, metrics and losses of Lockstep
    give it weight zero; code that counts samples by hand must leave it out. Tensors that were computed
    from a batch are not known: ask of what the loader yielded, or of a part of it.

    Raises:
        InputError: the loader has yielded a filler without tensors, and this holds none either and is no part of it.

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
        f"is_filler({type(batch).__name__}): cannot tell, as it holds no tensor and is no part of the batch that the "
        "loader yielded last, which is a filler: hand it what the loader has yielded"
    )


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, nested, a wrapper of torch.func
        return None
