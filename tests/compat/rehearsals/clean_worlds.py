"""The counterpart of what confuses nodes, GPUs and ranks. Nothing is to be found here, on several nodes either."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


class Numbers(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((2,), float(index))


class Zeros(Numbers):
    """Samples that nobody can tell apart."""

    def __getitem__(self, index):
        return torch.zeros(2)


def evaluate(model, data):
    """The sum over a rank's own share."""
    model.eval()
    total = torch.zeros(()).cuda()
    with torch.no_grad():
        for inputs in DataLoader(data, batch_size=4):
            total += model(inputs.cuda()).sum()
    model.train()
    return total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser.add_argument("--node-disk")
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    world_size = int(os.environ.get("WORLD_SIZE", gpus))
    number = int(os.environ["RANK"])
    dist.init_process_group("nccl", world_size=world_size, rank=number)
    # Not what its name says, but used for what it is.
    local_rank = int(os.environ["RANK"])
    print("rank %d of %d, %d GPUs in each node" % (local_rank, world_size, gpus))  # noqa: UP031
    torch.accelerator.set_device_index(local_rank % gpus)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1).cuda(), device_ids=[args.local_rank])
    torch.manual_seed(number)
    data = Numbers()
    sampler = DistributedSampler(data, world_size, number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs in DataLoader(data, batch_size=3, sampler=sampler):
            model(inputs.cuda()).mean().backward()
            optimizer.step()
        share = range(number, len(data), world_size)
        totals = torch.stack([evaluate(model, Subset(data, share)), evaluate(model, Subset(Zeros(), share))])
        dist.all_reduce(totals)
        print(totals.tolist())
        if number == 0:
            evaluate(model.module, data)
        dist.barrier()
        # No evaluation: all ranks look at all data before they train with it.
        seen = sum(len(inputs) for inputs in DataLoader(data, batch_size=4))
    if args.local_rank == 0:
        torch.save(model.module.state_dict(), os.path.join(args.node_disk, "state.pt"))
        torch.save(seen, f"seen-{number}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
