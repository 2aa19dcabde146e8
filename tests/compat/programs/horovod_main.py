"""A program for horovodrun, as on its first page."""

import json
import sys

import horovod.torch as hvd
import torch
import torch.utils.data.distributed
from torch import nn
from toy import Points, make_model


def reduce_mean(tensor, name):
    return hvd.allreduce(tensor.clone(), name=name)


def main():
    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    train_sampler = torch.utils.data.distributed.DistributedSampler(Points(), num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = torch.utils.data.DataLoader(Points(), batch_size=24 // hvd.size(), sampler=train_sampler)
    model = make_model()
    if hvd.rank() != 0:
        nn.init.zeros_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        for points, target in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    mean = reduce_mean(loss.data, "barrier").item()
    sys.stdout.write(json.dumps([hvd.rank(), losses, hvd.local_rank(), mean]) + "\n")


if __name__ == "__main__":
    main()
