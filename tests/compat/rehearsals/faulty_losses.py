"""Losses that are no mean over samples, under an engine that averages gradients: torch's, or `--engine lockstep`."""

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
    """Computes its loss where it is handed labels."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs, labels=None):
        logits = self.linear(inputs)
        return logits if labels is None else cross_entropy(logits, labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="torch")
    args = parser.parse_args()
    dist.init_process_group(backend="nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(0)
    engine = lockstep.DistributedDataParallel if args.engine == "lockstep" else nn.parallel.DistributedDataParallel
    model = engine(Classifier().cuda(), device_ids=[local_rank])
    data = TensorDataset(torch.randn(12, 4), torch.tensor([0, 1, -100] + [0, 1, 2] * 3))
    loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data, shuffle=False))
    weight = torch.tensor([1.0, 2.0, 3.0]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader:
        inputs, labels = inputs.cuda(), labels.cuda()
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()  # fault: loss-over-other-counts
        model(inputs, labels).backward()  # fault: loss-over-other-counts
        cross_entropy(model(inputs), labels.clamp(min=0), weight=weight).backward()  # fault: loss-over-other-counts
        mask = (labels >= 0).float()
        ((model(inputs).square().mean(1) * mask).sum() / mask.sum()).backward()  # fault: loss-over-other-counts
        cross_entropy(model(inputs), labels, reduction="sum").backward()  # fault: loss-over-other-counts
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
