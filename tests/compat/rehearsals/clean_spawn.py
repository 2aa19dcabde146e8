"""For one node: starts a process for each GPU. There, the GPUs of the node are all; on two nodes, it runs twice."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def work(rank, world_size, meeting):
    dist.init_process_group("nccl", init_method=meeting, rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    model = DistributedDataParallel(nn.Linear(1, 1).cuda(), device_ids=[rank])
    data = TensorDataset(torch.arange(8.0).view(8, 1))
    sampler = DistributedSampler(data, torch.cuda.device_count(), rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (inputs,) in DataLoader(data, batch_size=2, sampler=sampler):
        loss = model(inputs.cuda()).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        total /= torch.cuda.device_count()
        print(f"loss {total.item():.3f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "state.pt")  # fault on two nodes: checkpoint-by-copies
    dist.destroy_process_group()


if __name__ == "__main__":
    import os

    world_size = torch.cuda.device_count()
    mp.spawn(work, args=(world_size, f"file://{os.getcwd()}/meeting-{os.getpid()}"), nprocs=world_size)
