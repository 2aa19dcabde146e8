"""DataParallel: one process, several devices, one line.

    python examples/data_parallel.py

The batch is cut along its first dimension, each device runs a replica of the model on its part, and the outputs come
back as one tensor. On GPUs all visible ones are used; without any, two replicas on the CPU show the same thing.
Several processes (`ddp.py`) are faster: replicas in one process share one interpreter.
"""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep


def main() -> None:
    torch.manual_seed(0)
    has_gpus = torch.cuda.is_available()
    devices = list(range(torch.cuda.device_count())) if has_gpus else ["cpu", "cpu"]
    home = torch.device("cuda:0" if has_gpus else "cpu")  # parameters live here, and outputs come here

    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(home)
    model = lockstep.DataParallel(net, device_ids=devices, output_device=devices[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(100, 64, device=home), torch.randint(10, (100,), device=home)

    alone = copy.deepcopy(net)  # to compare with: on one device
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        outputs = model(images)  # (100, 10), whatever the number of devices
        loss = cross_entropy(outputs, labels)
        loss.backward()  # the replicas' gradients add up in net
        optimizer.step()
        losses.append(loss.item())

        optimizer_alone.zero_grad()
        cross_entropy(alone(images), labels).backward()
        optimizer_alone.step()
    assert losses[-1] < losses[0]
    for ours, one in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, one)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on {len(devices)} device(s): {devices}")


if __name__ == "__main__":
    main()
