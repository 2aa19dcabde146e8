"""A collective on one row of a mesh, which one of the row's ranks leaves out."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "model"))
value = torch.ones(1, device="cuda")
for name in ("data", "model"):
    dist.all_reduce(value, group=mesh[name].get_group())
print(value.item())
if rank != 3:
    dist.all_reduce(value, group=mesh["model"].get_group())  # fault: rank-only-collective
    print(value.item())
