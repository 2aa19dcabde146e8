"""Ranks that part: under a test of the rank, or by what their data says."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(0)
rank = dist.get_rank()
value = torch.ones(1, device="cuda")
dist.all_reduce(value)
print(value.item())
if sys.argv[1] == "rank":
    if rank == 0:
        dist.all_reduce(value)  # fault: rank-only-collective
        print(value.item())
else:
    loss = 1.0 + rank
    if loss > 1.5:
        dist.barrier()  # fault: branch-dependent-collective
    dist.broadcast(value, src=0)
