"""The counterpart of the faulty losses: what is a mean over samples, however it is written, or divided rightly."""

import torch
import torch.distributed as dist
from loss_parts import start
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

import lockstep


class Classifier(nn.Module):
    """Divides by sums inside, which are no losses."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.linear(inputs / self.linear.weight.sum().abs()) * self.linear.bias.square().sum()


def main():
    model, loader, weight, optimizer = start(Classifier)
    scaler = torch.amp.GradScaler("cuda")
    for inputs, labels in loader:
        inputs, labels = inputs.cuda(), labels.cuda()
        every = labels.clamp(min=0)
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(inputs), every)).backward()
        (cross_entropy(model(inputs), every, reduction="sum") / len(every)).backward()
        # Targets that are probabilities, as of labels that are mixed or smoothed.
        cross_entropy(model(inputs), one_hot(every, 3).float()).backward()
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
        loss = cross_entropy(model(inputs), labels, reduction="sum") * dist.get_world_size() / count
        lockstep.global_loss(loss).backward()
        assert all(each.grad.device == each.device for each in model.parameters())
        scaler.step(optimizer)
        scaler.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
