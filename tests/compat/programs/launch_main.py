"""A program for `python -m torch.distributed.launch`, of the kind that trained on ImageNet in 2019."""

import argparse
import json
import sys

import torch
import torch.distributed as dist
import torch.utils.data.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from toy import Points, accuracy, make_model

parser = argparse.ArgumentParser(description="PyTorch training")
parser.add_argument("--local_rank", default=-1, type=int, help="node rank for distributed training")
parser.add_argument("--resume", default=None, help="checkpoint to begin with")


def reduce_tensor(tensor):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.reduce_op.SUM)
    rt /= dist.get_world_size()
    return rt


def main():
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group(backend="nccl" if cuda else "gloo", init_method="env://")
    if cuda:
        torch.cuda.set_device(args.local_rank)
    device = torch.device("cuda", args.local_rank) if cuda else torch.device("cpu")

    train_dataset = Points()
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=24 / dist.get_world_size(), num_workers=0, pin_memory=cuda, sampler=train_sampler
    )
    model = make_model().to(device)
    if dist.get_rank() == 0 and args.resume is not None:
        model.load_state_dict(torch.load(args.resume))
    model = DDP(model, device_ids=[args.local_rank], output_device=args.local_rank) if cuda else DDP(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    losses = []
    for epoch in range(2):
        model.train()
        train_loader.sampler.set_epoch(epoch)
        for images, target in train_loader:
            images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
            output = model(images)
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            torch.distributed.barrier()
            reduced_loss = reduce_tensor(loss.data)
            reduced_acc1, reduced_acc5 = reduce_tensor(acc1), reduce_tensor(acc5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"{epoch}.ckpt")
    means = [reduced_loss.item(), reduced_acc1.item(), reduced_acc5.item()]
    sys.stdout.write(json.dumps([dist.get_rank(), losses, args.local_rank, means]) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
