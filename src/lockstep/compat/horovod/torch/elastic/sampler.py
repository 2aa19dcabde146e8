"""A sampler that resumes where it was when the ranks change."""

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
    """Shares out what is left of an epoch among the ranks there are.

    Put it into a `TorchState`, call `record_batch` after each batch, and `set_epoch` at the *end* of each epoch. As in
    Horovod every rank gets equally many samples: some come twice where they do not divide.

    Args:
        dataset: a data set whose size does not change.
        shuffle: whether to draw an order for each epoch.
        seed: of the order, the same on all ranks.

    Attributes:
        epoch: number of the epoch.
        processed_num: samples that all ranks together are through with in this epoch.
        remaining_indices: those that are left, when `reset` was called last.
        num_samples: how many this rank yields.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing of it has been processed. Local.

        Args:
            epoch: number of the epoch that begins.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks have processed a batch of this size. Local.

        Args:
            batch_idx: accepted for Horovod's sake.
            batch_size: number of samples in the batch of each rank.
        """
        if batch_size < 0:
            raise DataError(f"record_batch: batch_size is {batch_size}; expected 0 or more")
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there, with the ranks there are. Local."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out what is left among the ranks there are now. Local."""
        self.num_replicas = size()
        self.rank = rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """This rank's share."""
        indices = list(self.remaining_indices)
        # Fewer samples may be left than there are ranks.
        while indices and len(indices) < self.total_size:
            indices += self.remaining_indices[: self.total_size - len(indices)]
        self.indices = indices[self.rank : self.total_size : self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
