"""For several nodes: each starts a process for each of its GPUs, and all of them are the ranks of one job."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def work(local_rank, node, world_size):
    rank = node * torch.cuda.device_count() + local_rank
    dist.init_process_group("nccl", f"file://{os.getcwd()}/one-meeting", rank=rank, world_size=world_size)
    torch.cuda.set_device(local_rank)
    model = DistributedDataParallel(nn.Linear(1, 1).cuda(), device_ids=[local_rank])
    data = TensorDataset(torch.arange(14.0).view(14, 1))
    sampler = DistributedSampler(data, world_size, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    total, seen = torch.zeros((), device="cuda"), 0
    for (inputs,) in DataLoader(data, batch_size=2, sampler=sampler):
        loss = model(inputs.cuda()).square().mean()
        loss.backward()
        optimizer.step()
        total, seen = total + loss.detach(), seen + 1
    dist.all_reduce(total)
    print(f"loss {total.item() / seen / world_size:.3f}")
    mean = loss.detach()
    dist.all_reduce(mean)
    mean /= torch.cuda.device_count()  # fault: world-size-from-device-count
    assert mean.item() >= 0
    if rank == 0:
        torch.save(model.module.state_dict(), "state.pt")
    if local_rank == 0:
        torch.save(model.module.state_dict(), "node.pt")  # fault: checkpoint-by-every-node
    dist.destroy_process_group()


if __name__ == "__main__":
    nodes = int(os.environ["WORLD_SIZE"])
    mp.spawn(work, (int(os.environ["RANK"]), nodes * torch.cuda.device_count()), torch.cuda.device_count())
