"""Losses that are no mean over samples, under an engine that averages gradients: torch's, or `--engine lockstep`."""

import torch.distributed as dist
from loss_parts import start
from torch import nn
from torch.nn.functional import cross_entropy


class Classifier(nn.Module):
    """Computes its loss where it is handed labels."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs, labels=None):
        logits = self.linear(inputs)
        return logits if labels is None else cross_entropy(logits, labels)


def main():
    model, loader, weight, optimizer = start(Classifier)
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
