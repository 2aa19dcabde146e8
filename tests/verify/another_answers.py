"""Programs that give another answer on N ranks than on one, each with the stage at which `lockstep verify` finds that.

A row is a function of a `Site`, as in tests/parity: it trains by what the site gives it. `run_row.py` runs one on real
ranks; `test_another_answers.py` has all of them verified, and once more with what their row of docs/same-answer.md says
to write (`site.changes`), which gives the answer of one process.

To add a row: a function, and a line in `ANOTHER_ANSWERS` with the stage: one of `lockstep.tools.verify.causes.STAGES`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import lockstep

CLASSES = 4

Row = Callable[["Site"], None]


class Site:
    """What a row trains with, on one process or on a rank of several: there is one kind of code for both.

    Args:
        heeds: write what the row of docs/same-answer.md says.
    """

    def __init__(self, heeds: bool) -> None:
        self.changes = heeds

    def wrap(self, model: nn.Module) -> nn.Module:
        return lockstep.DistributedDataParallel(model)

    def loader(self, dataset: Any, batch_size: int, **options: Any) -> Any:
        return lockstep.DataLoader(dataset, batch_size, shuffle=True, seed=3, **options)

    def no_sync(self, model: Any) -> Any:
        return model.no_sync()

    def samples(self, model: Any, count: int) -> Any:
        return model.samples(count)


class Net(nn.Module):
    """Takes samples of 3 numbers."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.hidden = nn.Linear(3, 4)
        self.out = nn.Linear(4, 1)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(inputs)))


class Rows(torch.utils.data.Dataset[Any]):
    """Samples in the form that `shape` gives them, of (x, y, index)."""

    def __init__(self, count: int, shape: Callable[[Tensor, Tensor, int], Any], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
        self.y = torch.randn(count, 1, generator=generator, dtype=torch.float64)
        self.shape = shape

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.shape(self.x[index], self.y[index], index)


def pairs(count: int) -> Rows:
    return Rows(count, lambda x, y, index: (x, y))


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def steps(site: Site, loss: Callable[[Any, Tensor, Tensor], Tensor], count: int = 23, batch_size: int = 6) -> None:
    """An epoch on labelled samples, with a loss of model, inputs and labels."""
    torch.manual_seed(2)
    model = site.wrap(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double())
    optimizer = sgd(model)
    for x, labels in site.loader(Rows(count, lambda x, y, index: (x, index % CLASSES)), batch_size):
        optimizer.zero_grad()
        loss(model, x, labels).backward()
        optimizer.step()


def by_selection(site: Site) -> None:
    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        mask = x[:, 0] > -0.5
        if not site.changes:
            return cross_entropy(model(x)[mask], labels[mask])
        return lockstep.mean(cross_entropy(model(x)[mask], labels[mask], reduction="sum"), mask.sum())

    steps(site, loss, batch_size=12)


def by_statistics(site: Site) -> None:
    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        values, output = x[:, 0], model(x)
        if site.changes:
            mean = lockstep.mean(values.sum(), len(values))
            variance = lockstep.mean((values - mean).square().sum(), len(values))
        else:
            mean, variance = values.mean(), values.var(correction=0)
        return ((values - mean) / (variance + 0.1).sqrt() * output[:, 0]).mean()

    steps(site, loss)


def cut_short(site: Site) -> None:
    """A window of accumulation that the end of the data cuts short, stepped by what each rank has."""
    model = site.wrap(Net())
    optimizer, loader, window = sgd(model), site.loader(pairs(23), 6), 3
    for number, (x, y) in enumerate(loader):
        is_last = (number + 1) % window == 0
        if number + 1 == len(loader):
            is_last = is_last or site.changes
        with contextlib.nullcontext() if is_last else site.no_sync(model):
            loss_of(model(x), y).backward()
        if is_last or number + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


# Name -> (program, the stage at which it parts from one process).
ANOTHER_ANSWERS: dict[str, tuple[Row, str]] = {
    "by_selection": (by_selection, "loss"),
    "by_statistics": (by_statistics, "loss"),
    "cut_short": (cut_short, "gradients"),
}
