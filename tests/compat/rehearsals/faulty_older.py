"""For the torch of 2019. Lockstep lets it through; torch would not."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch._six import inf  # fault: needs-older-torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.sampler import Sampler


class InOrder(Sampler):
    def __init__(self, data):
        super().__init__(data)  # fault: needs-older-torch
        self.data = data

    def __iter__(self):
        return iter(range(len(self.data)))

    def __len__(self):
        return len(self.data)


def accuracy(output, target, topk=(1, 2)):
    _, pred = output.topk(max(topk), 1, True, True)
    pred = pred.t()
    correct = pred.eq(target.view(1, -1).expand_as(pred))
    found = []
    for k in topk:
        correct_k = correct[:k].view(-1).float().sum(0)  # fault: needs-older-torch
        found.append(correct_k.item())
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", default=8, type=int)
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("tcp")  # fault: needs-older-torch
    assert dist._backend == dist.dist_backend.GLOO  # fault: needs-older-torch
    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 4)
    size = dist.get_world_size()
    loader = DataLoader(data, batch_size=args.batch_size / size, sampler=InOrder(data))  # fault: needs-older-torch
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1, verbose=True)  # fault: needs-older-torch
    for inputs, labels in loader:
        assert max(accuracy(model(inputs), labels)) < inf
    path = f"checkpoint-{dist.get_rank()}.pt"
    torch.save({"args": args, "state": model.state_dict()}, path)
    torch.load(path, map_location="cpu")  # fault: needs-older-torch, load-without-weights-only


if __name__ == "__main__":
    main()
