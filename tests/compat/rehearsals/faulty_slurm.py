"""One task per node that starts a process per GPU, and takes the number of tasks for the number of ranks.

Its `local_rank` is the number of the node, and it takes it for nothing else.
"""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(gpu, per_node, url):
    local_rank = int(os.environ["SLURM_PROCID"])
    world_size = int(os.environ["SLURM_NPROCS"])
    rank = local_rank * per_node + gpu
    dist.init_process_group("nccl", init_method=url, world_size=world_size, rank=rank)  # fault: slurm-world-size


if __name__ == "__main__":
    per_node = torch.cuda.device_count()
    mp.spawn(work, nprocs=per_node, args=(per_node, f"file://{os.getcwd()}/meeting"))
