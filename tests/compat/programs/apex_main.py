"""A program for Apex, started by torch.distributed.launch."""

import argparse
import json
import sys

import torch
import torch.distributed as dist
from apex import amp
from apex.parallel import DistributedDataParallel
from torch import nn
from toy import Points, make_model

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=-1, type=int)
parser.add_argument("--opt-level", default="O1")


def main():
    args = parser.parse_args()
    dist.init_process_group(backend="gloo")
    train_sampler = torch.utils.data.distributed.DistributedSampler(Points())
    train_loader = torch.utils.data.DataLoader(Points(), batch_size=24 // dist.get_world_size(), sampler=train_sampler)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)
    model = DistributedDataParallel(model)
    losses = []
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        for points, target in train_loader:
            loss = nn.functional.cross_entropy(model(points), target)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            losses.append(loss.item())
    sys.stdout.write(json.dumps([dist.get_rank(), losses, args.local_rank]) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
