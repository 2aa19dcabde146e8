"""For the torch of 2019, with ranks that the script starts itself."""

import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def worker(rank, world_size):
    dist.init_process_group("tcp", "file://met", rank=rank, world_size=world_size)  # fault: needs-older-torch
    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 4)
    loader = DataLoader(data, 8 / world_size, sampler=DistributedSampler(data))  # fault: needs-older-torch
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader:
        optimizer.zero_grad()
        output = model(inputs)
        nn.functional.cross_entropy(output, labels).backward()
        optimizer.step()
        pred = output.topk(2)[1].t()
        correct = pred.eq(labels.view(1, -1).expand_as(pred))
        correct[:2].view(-1).float().sum().item()  # fault: needs-older-torch
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", default=2, type=int)
    size = parser.parse_args().world_size
    mp.spawn(worker, (size,), size)
