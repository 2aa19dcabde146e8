"""The same tutorial's synchronous SGD: a partitioned dataset, a float batch size, gradients averaged by hand."""

import json
import sys
from math import ceil
from random import Random

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import optim
from torch.autograd import Variable
from toy import Points, make_model


class Partition:
    """Part of a dataset."""

    def __init__(self, data, index):
        self.data = data
        self.index = index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, index):
        return self.data[self.index[index]]


class DataPartitioner:
    """Shuffles a dataset and divides it."""

    def __init__(self, data, sizes=(0.7, 0.2, 0.1), seed=1234):
        self.data = data
        self.partitions = []
        indexes = list(range(len(data)))
        Random(seed).shuffle(indexes)
        for fraction in sizes:
            length = int(fraction * len(data))
            self.partitions.append(indexes[:length])
            indexes = indexes[length:]

    def use(self, partition):
        return Partition(self.data, self.partitions[partition])


def partition_dataset(rank, size):
    batch_size = 24 / float(size)
    partition = DataPartitioner(Points(), [1.0 / size for _ in range(size)]).use(rank)
    return torch.utils.data.DataLoader(partition, batch_size=batch_size, shuffle=True), batch_size


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.reduce_op.SUM)
        param.grad.data /= size


def run(rank, size):
    torch.manual_seed(1234)
    train_set, batch_size = partition_dataset(rank, size)
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    num_batches = ceil(len(train_set.dataset) / float(batch_size))
    losses = []
    for _ in range(3):
        epoch_loss = 0.0
        for data, target in train_set:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(Variable(data)), Variable(target))
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        losses.append(epoch_loss / num_batches)
    sys.stdout.write(json.dumps([rank, losses]) + "\n")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
