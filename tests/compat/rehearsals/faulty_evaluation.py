"""Every rank evaluates all there is, throws away what it reduced, and one rank of each node writes the checkpoint."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def average(value):
    total = value.clone()
    dist.all_reduce(total)  # fault: reduced-value-unused
    total /= dist.get_world_size()
    return total


def train(model, loader, optimizer):
    for inputs, labels in loader:
        loss = nn.functional.mse_loss(model(inputs.cuda()), labels.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {average(loss.detach()).item():.3f}")


def validate(model, loader):
    model.eval()
    for inputs, labels in loader:
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(inputs.cuda()), labels.cuda())
        average(loss)
    model.train()


def count(model, loader):
    with torch.no_grad():
        for inputs, _ in loader:
            model(inputs.cuda())
        average(torch.tensor(float(len(loader)) + 0.5).cuda())


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(local_rank)
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(3, 1).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator))
    sampler = DistributedSampler(data)
    train_loader = DataLoader(data, batch_size=2, sampler=sampler)
    valid_loader = DataLoader(data, batch_size=3)  # fault: evaluation-on-every-rank
    shuffled = DataLoader(data, batch_size=4, shuffle=True)  # fault: evaluation-on-every-rank
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train(model, train_loader, optimizer)
        validate(model, valid_loader)
        count(model, shuffled)
    if local_rank == 0:
        torch.save(model.module.state_dict(), "state.pt")  # fault: checkpoint-by-every-node
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
