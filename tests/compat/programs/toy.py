"""What the programs here train: a small classifier of points, and how its authors measured it."""

import torch
from torch import nn

torch.set_num_threads(1)


class Points(torch.utils.data.Dataset):
    """Points around ten centres, the same in every process."""

    def __init__(self, count: int = 96) -> None:
        generator = torch.Generator().manual_seed(7)
        self.labels = torch.arange(count) % 10
        centres = 2 * torch.randn(10, 6, generator=generator)
        self.points = centres[self.labels] + torch.randn(count, 6, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.points[index], self.labels[index]


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 10))


def accuracy(output, target, topk=(1,)):
    """Share of the samples whose label is among the k best, for each k; as programs of 2019 had it."""
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        pred = pred.t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))
        return [correct[:k].view(-1).float().sum(0, keepdim=True) / target.size(0) for k in topk]
