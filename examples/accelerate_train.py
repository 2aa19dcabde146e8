"""A training loop of Hugging Face Accelerate's on the lockstep group.

    lockstep run --nproc 2 examples/accelerate_train.py

Needs: pip install accelerate scikit-learn

Accelerate chooses a backend from a list of names of its own, and refuses others in
`InitProcessGroupKwargs(backend=...)`. It takes a group that is there already, though: `lockstep.init()` before the
`Accelerator` is the one line that is needed. On CPUs Accelerate's state continues to say "gloo", because that names its
choice and not the group; `dist.get_backend()` names the group.
"""

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    with lockstep.init() as world:
        accelerator = Accelerator(cpu=world.device.type == "cpu")

        digits = load_digits()
        data = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
        # Accelerate's batch size is per rank.
        loader = DataLoader(data, batch_size=64 // accelerator.num_processes, shuffle=True)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

        for epoch in range(options.epochs):
            losses = []
            for images, labels in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                losses.append(loss.detach())
            loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
            accelerator.print(
                f"epoch {epoch}: loss {loss.item():.4f} on {accelerator.num_processes} process(es) over "
                f"{dist.get_backend()}"
            )


if __name__ == "__main__":
    main()
