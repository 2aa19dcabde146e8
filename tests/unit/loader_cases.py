"""Datasets and ways to run them that the tests of the loader share."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import Dataset

from lockstep import batch
from lockstep.batch.share import BatchShare
from lockstep.data import DataLoader

WORLDS = (1, 2, 3, 5)


class Numbers(Dataset):
    """Sample i is i, wrapped so that torch asks for one sample at a time."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(index)


class Seeded(Numbers):
    """Draws from the generator it is given."""

    def __getitem__(self, index, *, generator):
        return torch.stack([torch.tensor(float(index)), *torch.rand(2, generator=generator)])


class Drawing(Numbers):
    """Draws from all process-wide generators, as transforms do."""

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64)


def run_epoch(loader):
    """[(samples as a list, share)] of one iteration."""
    return [(loaded.tolist(), batch.hand.current()) for loaded in loader]


def run_ranks_in_turn(dataset, world_size, *, epochs=1, state=None, stop=None, **options):
    """Samples of the last epoch, global batch by global batch, fillers left out; checks the shares."""
    per_rank = []
    for rank in range(world_size):
        loader = DataLoader(dataset, rank=rank, world_size=world_size, **options)
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(epochs):
            batches = []
            for loaded in loader:
                share = batch.hand.current()
                batches.append((loaded.tolist()[: share.local_samples], share))
                if len(batches) == stop:
                    break
        per_rank.append(batches)
    together = []
    for parts in zip(*per_rank, strict=True):
        samples = [sample for part, _ in parts for sample in part]
        assert all(share == BatchShare(len(part), len(samples), world_size) for part, share in parts)
        together.append(samples)
    return together
