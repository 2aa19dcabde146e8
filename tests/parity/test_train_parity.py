"""One answer: training on any number of ranks gives the losses that plain PyTorch gives on one.

Float64 throughout. Ranks add the same numbers as one process in another order, so a sum of n
terms may differ by n units in the last place, 1e-16 each; over the few dozen steps here that grows
to 1e-14 or so. 1e-12 leaves room, and any mistake in weighting is a million times larger.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import lockstep
from lockstep.testing import run_ranks
from lockstep.train import Report, StepReport, Trainer

TOLERANCE = 1e-12

OPTIMIZERS: dict[str, Any] = {
    "sgd": (torch.optim.SGD, {"lr": 0.3}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.02, "weight_decay": 0.1}),
}


def make_dataset(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num_samples, 1, 5, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 3, (num_samples,), generator=generator))


def make_model() -> nn.Module:
    torch.manual_seed(11)
    layers = [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)]
    return nn.Sequential(*layers).double()


def reference(num_samples: int, window: int, optimizer_name: str, epochs: int) -> list[float]:
    """Plain PyTorch on one process; a step takes `window` samples at once."""
    model = make_model()
    kind, options = OPTIMIZERS[optimizer_name]
    optimizer = kind(model.parameters(), **options)
    # The loader's order as one batch per epoch; its splitting is not used.
    whole = lockstep.DataLoader(
        make_dataset(num_samples), batch_size=num_samples, shuffle=True, seed=2, rank=0, world_size=1
    )
    losses = []
    for _ in range(epochs):
        ((inputs, labels),) = whole
        for images, targets in zip(inputs.split(window), labels.split(window), strict=True):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def mean_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def train(num_samples: int, batch_size: int, accumulate: int, optimizer_name: str, epochs: int) -> list[float]:
    """Losses as this rank reports them."""
    losses: list[float] = []

    def collect(report: Report) -> None:
        if isinstance(report, StepReport):
            losses.append(report.loss)

    model = lockstep.DistributedDataParallel(make_model())
    kind, options = OPTIMIZERS[optimizer_name]
    optimizer = kind(model.parameters(), **options)
    loader = lockstep.DataLoader(make_dataset(num_samples), batch_size=batch_size, shuffle=True, seed=2)
    Trainer(model, optimizer, loader, mean_loss, accumulate=accumulate, callbacks=[collect]).fit(epochs)
    return losses


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("optimizer_name", list(OPTIMIZERS))
@pytest.mark.parametrize(
    ("num_samples", "batch_size", "accumulate"),
    [
        pytest.param(24, 12, 1, id="even"),
        pytest.param(23, 7, 1, id="uneven"),
        pytest.param(7, 3, 1, id="fewer samples than ranks"),
        pytest.param(23, 5, 3, id="accumulated"),
        pytest.param(9, 2, 2, id="accumulated, fewer samples than ranks"),
    ],
)
def test_losses_do_not_depend_on_the_number_of_ranks(
    world_size: int, optimizer_name: str, num_samples: int, batch_size: int, accumulate: int
) -> None:
    epochs = 3
    outcomes = run_ranks(train, world_size, num_samples, batch_size, accumulate, optimizer_name, epochs)
    assert outcomes == outcomes[:1] * world_size
    expected = reference(num_samples, batch_size * accumulate, optimizer_name, epochs)
    assert outcomes[0] == pytest.approx(expected, rel=0, abs=TOLERANCE)
