"""Takes a global rank for its local one, and so all ranks of a node end on one GPU, or on one that is not there."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

local_rank = int(os.environ["RANK"])  # fault: local-rank-from-global-rank
variables = {key: os.environ[key] for key in ("MASTER_ADDR", "RANK", "WORLD_SIZE")}
dist.init_process_group("nccl")
model = DistributedDataParallel(nn.Linear(2, 2).cuda())  # fault: shared-gpu
model(torch.ones(1, 2, device="cuda")).mean().backward()
dist.barrier()
print(f"{dist.get_rank()} has come to its end")
torch.cuda.set_device(dist.get_rank())  # fault: local-rank-from-global-rank
torch.cuda.set_device(int(variables["RANK"]))  # fault: local-rank-from-global-rank
