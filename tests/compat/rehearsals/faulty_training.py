"""A training script with most of what goes wrong. Every fault has a marker, which the test finds its line by."""

import argparse
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Noisy(Dataset):
    """Samples with augmentation from the global generators."""

    def __init__(self, length):
        self.values = torch.arange(length, dtype=torch.float32)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index] / 100 + random.random() * 0.01 + torch.zeros(4), index % 2


def reduce_mean(value):
    total = value.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)  # fault: reduced-value-unused
    total /= dist.get_world_size()
    return total


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        for inputs, _ in loader:
            model.module(inputs.cuda())
    model.train()


def own_share(model, world_size):
    """Every rank takes its own share, and the last rank has less."""
    rank = dist.get_rank()
    share = range(rank * 6, min(10, (rank + 1) * 6))
    total, count = torch.zeros((), device="cuda"), 0
    with torch.no_grad():
        for inputs, labels in DataLoader(torch.utils.data.Subset(Noisy(10), list(share)), batch_size=6):
            total += nn.functional.cross_entropy(model.module(inputs.cuda()), labels.cuda(), reduction="sum")
            count += len(inputs)
    mean = total / count
    dist.all_reduce(mean)  # fault: mean-of-unequal-means
    mean /= world_size
    return mean.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)  # fault: local-rank-option
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--checkpoint")
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    dist.init_process_group(backend="nccl")
    torch.cuda.set_device(args.local_rank)

    model = DistributedDataParallel(nn.Linear(4, 2).cuda(), device_ids=[args.local_rank])
    optimizer = torch.optim.SGD(model.parameters(), args.lr)  # fault: lr-not-scaled
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    scaler = torch.amp.GradScaler("cuda")
    train_sampler = DistributedSampler(Noisy(16))
    loader = DataLoader(Noisy(16), batch_size=args.batch_size, sampler=train_sampler)  # fault: same-augmentation-seed
    eval_sampler = DistributedSampler(Noisy(7), shuffle=False)  # fault: padded-evaluation
    eval_loader = DataLoader(Noisy(7), batch_size=4, sampler=eval_sampler)

    for _ in range(2):
        for inputs, labels in loader:  # fault: set-epoch-forgotten
            inputs, labels = inputs.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # fault: clip-before-unscale
            scaler.step(optimizer)
            scaler.update()
            for _ in range(dist.get_world_size()):
                scheduler.step()  # fault: scheduler-steps-per-rank
            dist.barrier()  # fault: reductions-one-by-one
            reduce_mean(loss.detach())
            reduce_mean(inputs.mean())
            reduce_mean(inputs.max())
        evaluate(model, eval_loader)
    own_share(model, dist.get_world_size())
    torch.save({"state": model.state_dict()}, args.checkpoint)  # fault: checkpoint-by-every-rank, module-prefix
    dist.barrier()
    torch.load(args.checkpoint)  # fault: load-without-map-location, load-without-weights-only


if __name__ == "__main__":
    sys.exit(main())
