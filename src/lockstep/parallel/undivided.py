"""Warns if every rank trains on all the data, because the loader does not split it.

torch's `DataLoader` without a sampler gives every rank all the data. The training is right, and no faster than that of
one process; nobody would notice.
"""

from __future__ import annotations

import gc
from typing import Any

import torch.distributed as dist
import torch.utils.data
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler, Subset

from lockstep import batch
from lockstep.log import get_logger, warn_once

__all__ = ["warn_of_undivided_data"]

_logger = get_logger(__name__)
_PLAIN = (SequentialSampler, RandomSampler)
# What torch's loaders iterate by. The loader itself may be gone: `for batch in DataLoader(…)` keeps only this.
_ITERATOR: Any = getattr(torch.utils.data.dataloader, "_BaseDataLoaderIter", None)


def warn_of_undivided_data(group: dist.ProcessGroup) -> None:
    """Warn, on the first rank, if the only loaders under way are torch's and give each rank all the data. Local.

    Looks through all objects of this process, so it is called once.
    """
    if group.size() == 1 or group.rank() != 0 or batch.current() is not None or _ITERATOR is None:
        return
    # Not by isinstance: it is slower, and wakes up objects that stand for others.
    kinds = _with_subclasses(_ITERATOR)
    iterators = [each for each in gc.get_objects() if type(each) in kinds]
    datasets = [_undivided_dataset(each) for each in iterators]
    if not datasets or any(dataset is None for dataset in datasets):
        return
    dataset = datasets[0]
    warn_once(
        _logger,
        f"each of the {group.size()} ranks trains on all {len(dataset)} samples of its {type(dataset).__name__}: a "
        "torch.utils.data.DataLoader without a sampler does not split them. Use lockstep.DataLoader(dataset, "
        "batch_size=GLOBAL), where GLOBAL counts the samples of all ranks together, or give torch's loader "
        "sampler=torch.utils.data.DistributedSampler(dataset). If the dataset holds this rank's part only, all is well",
    )


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _undivided_dataset(iterator: Any) -> Any:
    """The dataset of which this iterator gives every rank all; None if it may be split, or nobody can tell."""
    sampler = getattr(iterator, "_index_sampler", None)
    sampler = sampler.sampler if type(sampler) is BatchSampler else sampler
    dataset = getattr(iterator, "_dataset", None)
    if type(sampler) not in _PLAIN or isinstance(dataset, IterableDataset | Subset):
        return None
    return dataset
