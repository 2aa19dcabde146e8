"""A sampler that resumes in the middle of an epoch when the ranks change."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from lockstep.compat.horovod.torch.context import rank, size
from lockstep.errors import DataError

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler[int]):
    """Divides the rest of an epoch between the current ranks.

    Put it into a `TorchState`, call `record_batch` after each batch, and `set_epoch` at the *end* of each epoch. As in
    Horovod every rank gets the same number of samples; some are repeated if they do not divide evenly.

    Args:
        dataset: a dataset of fixed size.
        shuffle: whether to shuffle each epoch.
        seed: seed of the order, the same on all ranks.

    Attributes:
        epoch: number of the epoch.
        processed_num: number of samples that all ranks have processed in this epoch.
        remaining_indices: indices left at the last `reset`.
        num_samples: number of samples that this rank yields.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, with no samples processed. Local.

        Args:
            epoch: number of the new epoch.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that all ranks have processed a batch of this size. Local.

        Args:
            batch_idx: ignored, for compatibility.
            batch_size: number of samples in each rank's batch.
        """
        if batch_size < 0:
            raise DataError(f"record_batch: batch_size is {batch_size}; expected 0 or more")
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a position, with the current ranks. Local."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples between the current ranks. Local."""
        self.num_replicas = size()
        self.rank = rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices."""
        indices = list(self.remaining_indices)
        # There may be fewer samples left than ranks.
        while indices and len(indices) < self.total_size:
            indices += self.remaining_indices[: self.total_size - len(indices)]
        self.indices = indices[self.rank : self.total_size : self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
