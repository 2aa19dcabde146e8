"""The counterpart of the faulty losses: what is a mean over samples, however it is written, or divided rightly."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lockstep


class Classifier(nn.Module):
    """Divides by sums inside, which are no losses."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.linear(inputs / self.linear.weight.sum().abs()) * self.linear.bias.square().sum()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="torch")
    args = parser.parse_args()
    dist.init_process_group(backend="nccl")
    local_rank, world_size = int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    torch.cuda.set_device(local_rank)
    torch.manual_seed(0)
    engine = lockstep.DistributedDataParallel if args.engine == "lockstep" else nn.parallel.DistributedDataParallel
    model = engine(Classifier().cuda(), device_ids=[local_rank])
    data = TensorDataset(torch.randn(12, 4), torch.tensor([0, 1, -100] + [0, 1, 2] * 3))
    loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data, shuffle=False))
    weight = torch.tensor([1.0, 2.0, 3.0]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for inputs, labels in loader:
        inputs, labels = inputs.cuda(), labels.cuda()
        every = labels.clamp(min=0)
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(inputs), every)).backward()
        (cross_entropy(model(inputs), every, reduction="sum") / len(every)).backward()
        logits = model(inputs)
        (logits.square().sum() / logits.numel() / 2).backward()
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        (cross_entropy(model(inputs), every) + 0.01 * penalty).backward()
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        (0.01 * penalty).backward()
        # The same on every rank: no rank's items weigh more.
        same = torch.cat([every[:5], torch.tensor([-100]).cuda()])
        cross_entropy(model(inputs), same).backward()
        # Divided by what all ranks have.
        total = cross_entropy(model(inputs), labels, reduction="sum")
        lockstep.mean(total, (labels >= 0).sum()).backward()
        total = cross_entropy(model(inputs), every, weight=weight, reduction="sum")
        lockstep.mean(total, weight[every].sum()).backward()
        lockstep.sum(model(inputs).square().sum()).backward()
        count = (labels >= 0).sum()
        dist.all_reduce(count)
        loss = cross_entropy(model(inputs), labels, reduction="sum") * world_size / count
        lockstep.global_loss(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
