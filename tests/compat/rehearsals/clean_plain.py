"""Starts its ranks itself, unless RANK says that a launcher has. Nothing is to be found here."""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, world_size):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT=sys.argv[1])
    dist.init_process_group("nccl")
    total = torch.ones(1, device=f"cuda:{rank}")
    dist.all_reduce(total)
    assert total.item() == world_size
    dist.destroy_process_group()


if __name__ == "__main__":
    print(json.dumps(dict(os.environ)))
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        mp.spawn(train, (2,), 2)
