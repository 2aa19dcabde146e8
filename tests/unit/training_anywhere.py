"""A training that uses what must work on every system, then what may refuse: `python training_anywhere.py FOLDER`.

Prints the backend, the sum of the trained parameters, and what the launcher and `spawn` say.
"""

from __future__ import annotations

import sys

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import lockstep


def train(folder: str) -> None:
    """Train a line, with the loader, a metric and a checkpoint. Collective."""
    data = torch.Generator().manual_seed(1)
    samples = TensorDataset(
        torch.randn(10, 3, generator=data, dtype=torch.float64), torch.randn(10, 1, generator=data, dtype=torch.float64)
    )
    with lockstep.init(seed=0) as world:
        model = lockstep.DistributedDataParallel(torch.nn.Linear(3, 1, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = lockstep.DataLoader(samples, batch_size=4, shuffle=True, seed=0)
        loss_mean = lockstep.metrics.Mean()
        for _ in range(2):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                loss_mean.update(loss.detach())
        loss_of_all = lockstep.metrics.synchronize({"loss": loss_mean})["loss"]
        lockstep.checkpoint.save(folder, {"model": model.state_dict(), "loader": loader.state_dict()}, step=1)
        trained = lockstep.checkpoint.load(folder)["model"]
        total = sum(float(value.detach().sum()) for value in trained.values())
        print(world.backend)
        print(repr(total + loss_of_all))


def print_refusals() -> None:
    """What the launcher says, and what `lockstep.spawn` says."""
    from lockstep import cli

    try:
        cli._dispatch(["run", "--nproc", "2", __file__])
    except lockstep.LockstepError as error:
        print(error)
    try:
        lockstep.spawn(train, ("",), nproc=1)
    except lockstep.LockstepError as error:
        print(error)


if __name__ == "__main__":
    train(sys.argv[1])
    from lockstep.launch import support

    try:
        support.check()
    except lockstep.LockstepError:
        print_refusals()
