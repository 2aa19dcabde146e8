"""What looks as if it were for an old torch, and is for today's, too. Nothing is to be found here."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def accuracy(output, target):
    _, pred = output.topk(2, 1, True, True)
    pred = pred.t()
    correct = pred.eq(target.view(1, -1).expand_as(pred))
    # One row lies in memory as it does in any torch.
    return correct[:1].view(-1).float().sum(0).item(), correct[:2].reshape(-1).float().sum(0).item()


dist.init_process_group("gloo")
data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 4)
size = 8 / dist.get_world_size()
for inputs, labels in DataLoader(data, batch_size=int(size)):
    print(accuracy(nn.Linear(4, 4)(inputs), labels))
