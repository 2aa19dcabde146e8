"""The counterpart of the faulty scripts: the same things, done as they should be. Nothing is to be found here."""

import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Noisy(Dataset):
    """Samples with augmentation from the global generators."""

    def __init__(self, length):
        self.values = torch.arange(length, dtype=torch.float32)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index] / 100 + random.random() * 0.01 + torch.zeros(4), index % 2


class Images:
    """What detection scripts make of a batch: its tensors are in a class of their own."""

    def __init__(self, samples):
        self.tensors = torch.stack([values for values, _ in samples])


def with_boxes(samples):
    """As many boxes as a picture shows: the first tensor in a batch is as long as the first picture has them."""
    rank = dist.get_rank()
    return Images(samples), [{"boxes": torch.zeros(3 + rank, 4)} for _ in samples]


def train_on_boxes(model, optimizer):
    pictures = TensorDataset(torch.rand(8, 4), torch.zeros(8))
    loader = DataLoader(pictures, batch_size=4, collate_fn=with_boxes, num_workers=1)
    for images, _ in loader:
        loss = model(images.tensors.cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        print(f"boxes {mean.item():.3f}")


def evaluate(model, rank, world_size):
    """Sums and counts in one collective, over a share without padding: rank 0 has more than the last."""
    totals = torch.zeros(2, device="cuda")
    with torch.no_grad():
        for inputs, labels in DataLoader(Subset(Noisy(7), list(range(rank, 7, world_size))), batch_size=4):
            logits = model.module(inputs.cuda())
            totals[0] += nn.functional.cross_entropy(logits, labels.cuda(), reduction="sum")
            totals[1] += len(inputs)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--checkpoint")
    args = parser.parse_args()
    dist.init_process_group(backend="nccl")
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    assert args.local_rank == local_rank
    assert dist.get_backend() == "nccl"
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    torch.manual_seed(0)
    model = DistributedDataParallel(module=nn.Linear(4, 2).to(device), device_ids=[local_rank])
    random.seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * world_size)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cuda")
    sampler = DistributedSampler(Noisy(17))  # pads, which is harmless where it trains
    loader = DataLoader(Noisy(17), batch_size=args.batch_size, sampler=sampler, pin_memory=True)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            numbers = torch.stack([loss.detach(), inputs.to(device).mean()])
            dist.all_reduce(numbers)
            numbers /= world_size
            if rank == 0:
                print("loss {:.3f}, mean {:.3f}".format(*numbers.tolist()))
        scheduler.step()
        evaluate(model, rank, world_size)
        train_on_boxes(model, optimizer)
        # All ranks decide alike, from what all know.
        is_done = torch.tensor(float(epoch > rank), device=device)
        dist.all_reduce(is_done, op=dist.ReduceOp.MAX)
        if is_done.item():
            dist.barrier()
    if rank == 0:
        torch.save({"state": model.module.state_dict(), "epoch": epoch}, args.checkpoint)
    dist.barrier()
    state = torch.load(args.checkpoint, map_location=device, weights_only=True)
    model.module.load_state_dict(state["state"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
