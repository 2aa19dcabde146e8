"""What the scripts about losses train: not a script of its own."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lockstep


def start(classifier):
    """The model under torch's engine, or ours with `--engine lockstep`; a loader, weights of classes, an optimizer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="torch")
    args = parser.parse_args()
    dist.init_process_group(backend="nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(0)
    engine = lockstep.DistributedDataParallel if args.engine == "lockstep" else nn.parallel.DistributedDataParallel
    model = engine(classifier().cuda(), device_ids=[local_rank])
    data = TensorDataset(torch.randn(12, 4), torch.tensor([0, 1, -100] + [0, 1, 2] * 3))
    loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data, shuffle=False))
    weight = torch.tensor([1.0, 2.0, 3.0]).cuda()
    return model, loader, weight, torch.optim.SGD(model.parameters(), lr=0.1)
