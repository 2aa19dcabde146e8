"""A program that spawns its processes itself and meets by tcp:// (alone) or file:// (as a task of Slurm)."""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from toy import Points, make_model


def main_worker(gpu, nprocs, args):
    rank = args["task"] * nprocs + gpu
    dist.init_process_group(
        backend="gloo", init_method=args["dist_url"], world_size=args["num_tasks"] * nprocs, rank=rank
    )
    train_sampler = torch.utils.data.distributed.DistributedSampler(Points())
    train_loader = torch.utils.data.DataLoader(
        Points(), batch_size=int(24 / dist.get_world_size()), sampler=train_sampler
    )
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        for points, target in train_loader:
            loss = nn.functional.cross_entropy(model(points), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    sys.stdout.write(json.dumps([rank, losses]) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "SLURM_PROCID" in os.environ:
        # Relative, as people wrote it: in the folder of the job.
        args = {
            "task": int(os.environ["SLURM_PROCID"]),
            "num_tasks": int(os.environ["SLURM_NPROCS"]),
            "dist_url": f"file://dist_file.{os.environ['SLURM_JOBID']}",
        }
        mp.spawn(main_worker, nprocs=int(sys.argv[1]), args=(int(sys.argv[1]), args))
    else:
        args = {"task": 0, "num_tasks": 1, "dist_url": f"tcp://127.0.0.1:{sys.argv[2]}"}
        mp.spawn(main_worker, nprocs=int(sys.argv[1]), args=(int(sys.argv[1]), args), join=True)
