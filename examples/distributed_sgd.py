"""Synchronous SGD written by hand, and the same curve as DistributedDataParallel.

    lockstep run --nproc 2 examples/distributed_sgd.py

Three pieces are enough: a partition of the data set that is the same on all ranks, a model that starts the same on all
ranks, and gradients that are averaged before each step.
"""

import random
from collections.abc import Sequence

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep

GLOBAL_BATCH = 128
EPOCHS = 2


class Partition(Dataset):
    """The samples of a data set that one rank trains on."""

    def __init__(self, data: Dataset, indices: Sequence[int]) -> None:
        self.data = data
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> object:
        return self.data[self.indices[position]]


def partition(data: Dataset, rank: int, size: int, seed: int = 1234) -> Partition:
    """Parts of one length, drawn by the same seed on every rank.

    Equal lengths matter: a rank with one batch more than another would wait for gradients that nobody sends. What does
    not divide evenly is left out, fewer samples than there are ranks. (`lockstep.DataLoader` leaves out none.)
    """
    indices = list(range(len(data)))
    random.Random(seed).shuffle(indices)
    length = len(indices) // size
    return Partition(data, indices[rank * length : (rank + 1) * length])


def average_gradients(model: nn.Module) -> None:
    """Sum over all ranks, then divide."""
    size = dist.get_world_size()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= size


def make_model() -> nn.Module:
    torch.manual_seed(1234)  # so that all ranks start from one model
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10), nn.LogSoftmax(dim=1))


def train(by_hand: bool, world: lockstep.World, data: Dataset) -> list[float]:
    """The loss of each epoch, averaged over all batches and ranks."""
    model = make_model()
    engine = model if by_hand else lockstep.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    loader = DataLoader(
        partition(data, world.rank, world.world_size),
        batch_size=GLOBAL_BATCH // world.world_size,  # a whole number, so that the global batch stays what it was
        shuffle=True,
        generator=torch.Generator().manual_seed(world.rank),
    )
    losses = []
    for _ in range(EPOCHS):
        total = torch.zeros(2, dtype=torch.float64)  # sum of the losses, number of batches
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nll_loss(engine(images), labels)
            loss.backward()
            if by_hand:
                average_gradients(model)
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0], dtype=torch.float64)
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
    return losses


def main() -> None:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    with lockstep.init(device="cpu") as world:  # on GPUs: model and batches .to(world.device)
        by_hand, by_engine = train(True, world, data), train(False, world, data)
        for epoch, (ours, theirs) in enumerate(zip(by_hand, by_engine, strict=True)):
            assert abs(ours - theirs) < 1e-6 * theirs, "float32 sums in another order: a rounding apart"
            if world.rank == 0:
                print(f"epoch {epoch}: loss {ours:.6f} by hand, {theirs:.6f} by DistributedDataParallel")
        assert by_hand[-1] < by_hand[0]


if __name__ == "__main__":
    main()
