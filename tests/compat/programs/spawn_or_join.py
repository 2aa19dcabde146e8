"""A program that spawns its processes itself, but for those that find torchrun's variables, as fairseq-train does."""

import os
import sys

import torch.multiprocessing as mp
from spawn_main import main_worker

if __name__ == "__main__":
    distributed_world_size = int(sys.argv[1])
    if all(key in os.environ for key in ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"]):
        # What was asked for is overwritten.
        distributed_world_size = int(os.environ["WORLD_SIZE"])
        args = {"task": int(os.environ["RANK"]), "num_tasks": distributed_world_size, "dist_url": "env://"}
        main_worker(0, 1, args)
    else:
        args = {"task": 0, "num_tasks": 1, "dist_url": f"tcp://127.0.0.1:{sys.argv[2]}"}
        mp.spawn(main_worker, nprocs=distributed_world_size, args=(distributed_world_size, args))
