"""Programs that give another answer on N ranks than on one, each with the stage at which `lockstep verify` finds that.

A row is a function of a `Site`, as in tests/parity: it trains by what the site gives it. `run_row.py` runs one on real
ranks; `test_another_answers.py` has all of them verified, and once more with what their row of docs/same-answer.md says
to write (`site.heeds`), which gives the answer of one process. tests/parity/test_another_answer.py compares the
parameters of that form with those of a plain model on one process (`site.alone`), to 1e-12.

To add a row: a function, and a line in `ANOTHER_ANSWERS` with the stage and cause, as in the table of docs/verify.md.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import Dataset

import lockstep

CLASSES = 4

Row = Callable[["Site"], None]


class Site:
    """What a row trains with, on one process or on a rank of several: there is one kind of code for both.

    Args:
        heeds: write what the row of docs/same-answer.md says.
    """

    alone = False  # with a plain model, beside the ranks: only in tests/parity

    def __init__(self, heeds: bool) -> None:
        self.heeds = heeds
        self.changes = heeds  # where the line would only be in the way of a plain model

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


class Rows(Dataset[Any]):
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
    """An epoch and a half on labelled samples, with a loss of model, inputs and labels."""
    torch.manual_seed(2)
    model = site.wrap(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double())
    optimizer = sgd(model)
    loader = site.loader(Rows(count, lambda x, y, index: (x, index % CLASSES)), batch_size)
    for x, labels in itertools.chain(loader, itertools.islice(loader, 2)):
        optimizer.zero_grad()
        loss(model, x, labels).backward()
        optimizer.step()


def train(batches: Any, model: nn.Module) -> None:
    optimizer = sgd(model)
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


# ---- losses -------------------------------------------------------------------------------------------


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


def by_square(site: Site) -> None:
    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        losses = cross_entropy(model(x), labels, reduction="none")
        mean = lockstep.mean(losses.sum(), len(losses)) if site.changes else losses.mean()
        return mean * mean

    steps(site, loss)


def by_the_hardest(site: Site) -> None:
    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        losses = cross_entropy(model(x), labels, reduction="none")
        losses = lockstep.all_gather(losses) if site.changes else losses
        return losses.topk(max(1, len(losses) // 2)).values.mean()

    steps(site, loss, batch_size=12)


class AllGatherGrad(torch.autograd.Function):
    """As nnU-Net has it for a Dice loss over the whole batch."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient[dist.get_rank()]


def by_torchs_collectives(count: int, site: Site) -> None:
    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        outputs, masks = model(x).sigmoid(), one_hot(labels, CLASSES).double()
        if site.changes:
            outputs, masks = lockstep.all_gather(outputs), lockstep.all_gather(masks)
        hits, sizes = (outputs * masks).sum(0), (outputs + masks).sum(0)
        if not site.heeds:
            hits, sizes = AllGatherGrad.apply(hits).sum(0), AllGatherGrad.apply(sizes).sum(0)
        return (1 - (2 * hits + 1) / (sizes + 1)).mean()

    steps(site, loss, count)


def divided_behind(site: Site) -> None:
    """As fairseq does: gradients of a sum, divided by what all ranks have counted."""
    torch.manual_seed(2)
    model = site.wrap(nn.Linear(3, CLASSES).double())
    optimizer = sgd(model)
    for x, labels in site.loader(Rows(23, lambda x, y, index: (x, index % CLASSES)), 6):
        optimizer.zero_grad()
        loss, count = cross_entropy(model(x), labels, reduction="sum"), torch.tensor(len(labels)).double()
        (lockstep.global_loss(loss) if site.changes else loss).backward()
        if not site.alone:
            dist.all_reduce(count)
            count /= dist.get_world_size()
        for parameter in model.parameters():
            parameter.grad /= count
        optimizer.step()


# ---- data ---------------------------------------------------------------------------------------------


def ready_made(site: Site) -> None:
    """Three batches of 1 to 5 rows make a step, the last one two."""
    everything, sizes = pairs(23), [5, 1, 4, 2, 3, 1, 5, 2]
    batches = list(zip(everything.x.split(sizes), everything.y.split(sizes), strict=True))
    model = site.wrap(Net())
    optimizer = sgd(model)
    for batch in site.loader(
        batches, 3, collate_fn=lambda parts: [torch.cat(each) for each in zip(*parts, strict=True)]
    ):
        inputs, targets = batch
        num_rows = 0 if lockstep.is_filler(batch) else len(targets)
        optimizer.zero_grad()
        with site.samples(model, num_rows) if site.changes else contextlib.nullcontext():
            loss_of(model(inputs), targets).backward()
        optimizer.step()


def padded(site: Site) -> None:
    """Sequences of which a model sees the mean over all places, padding too."""

    def collate(samples: list[Any]) -> Any:
        longest = 5 if site.heeds else max(len(x) for x, _ in samples)
        x = torch.stack([nn.functional.pad(x, (0, 0, 0, longest - len(x))) for x, _ in samples])
        return x, torch.stack([y for _, y in samples])

    dataset = Rows(23, lambda x, y, index: (x.expand(1 + index % 5, 3), y))
    model = site.wrap(Net())
    optimizer = sgd(model)
    for x, y in site.loader(dataset, 6, collate_fn=collate):
        optimizer.zero_grad()
        loss_of(model(x.mean(1)), y).backward()
        optimizer.step()


def drawn(site: Site) -> None:
    """Noise on the inputs, of what is collated; heeded, of each sample."""

    def noise() -> Tensor:
        return torch.randn(3, dtype=torch.float64)

    def collate(samples: list[Any]) -> Any:
        x, y = map(torch.stack, zip(*samples, strict=True))
        return x if site.heeds else x + noise(), y

    dataset = Rows(23, lambda x, y, index: (x + noise() if site.heeds else x, y))
    train(site.loader(dataset, 6, collate_fn=collate), site.wrap(Net()))


class Mixup(Dataset[Any]):
    """As docs/same-answer.md prints it."""

    def __init__(self, dataset: Dataset[Any], alpha: float) -> None:
        self.dataset, self.beta = dataset, torch.distributions.Beta(alpha, alpha)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        share = self.beta.sample()
        (x, y), (x2, y2) = self.dataset[index], self.dataset[int(torch.randint(len(self), ()))]
        return share * x + (1 - share) * x2, share * y + (1 - share) * y2


def mixed_up(site: Site) -> None:
    """Mixup of the samples of a rank, whoever seeds it; heeded, of each sample, in the dataset."""
    dataset: Dataset[Any] = pairs(23)
    batches = site.loader(Mixup(dataset, 0.4) if site.heeds else dataset, 6)

    def mixed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        share, order = torch.rand(()), torch.randperm(len(x))
        return share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]

    train(batches if site.heeds else (mixed(x, y) for x, y in batches), site.wrap(Net()))


# ---- the loop -----------------------------------------------------------------------------------------


def by_hand(site: Site) -> None:
    model = site.wrap(Net())
    parameters, optimizer = list(model.parameters()), sgd(model)
    for x, y in site.loader(pairs(24), 6):
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss_of(model(x), y), parameters), strict=True):
            if site.changes:
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
            parameter.grad = gradient
        optimizer.step()


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


class WithCriterion(nn.Module):
    """A model that computes its loss, with a weight of the criterion's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(self.net(x) * self.scale, y)


def beside(site: Site) -> None:
    inside = WithCriterion()
    optimizer = torch.optim.SGD(inside.parameters(), lr=0.1)
    model: Any = inside
    if site.heeds:
        model = site.wrap(inside)
    else:
        inside.net = site.wrap(inside.net)
    for x, y in site.loader(pairs(23), 6):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()


def clamped(site: Site) -> None:
    model = site.wrap(Net())
    optimizer = sgd(model)
    if not site.heeds:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    for x, y in site.loader(pairs(23), 6):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()


# ---- layers -------------------------------------------------------------------------------------------


class Centered(nn.Module):
    """Takes a running mean of its inputs off."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.inner = Net()
        self.center: Tensor
        self.register_buffer("center", torch.zeros(3, dtype=torch.float64))
        self.asks_all = site.changes

    def forward(self, x: Tensor) -> Tensor:
        everybodys = lockstep.all_gather(x) if self.asks_all else x
        self.center.lerp_(everybodys.detach().mean(0), 0.3)
        return self.inner(x - self.center.clone())


def centered(site: Site) -> None:
    train(site.loader(pairs(23), 6), site.wrap(Centered(site)))


class Noisy(Net):
    """Takes noise off its inputs that the script draws."""

    def __init__(self) -> None:
        super().__init__()
        self.noise: Tensor
        self.register_buffer("noise", torch.zeros(3, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs - self.noise)


def noisy(site: Site) -> None:
    inner = Noisy()
    model = site.wrap(inner)
    optimizer = sgd(model)
    generator = torch.Generator().manual_seed(0 if site.alone else dist.get_rank())
    for x, y in site.loader(pairs(23), 6):
        inner.noise.copy_(torch.randn(3, dtype=torch.float64, generator=generator))
        if site.changes:
            dist.broadcast(inner.noise, 0)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


# Name -> (program, stage and cause of where it parts from one process).
ANOTHER_ANSWERS: dict[str, tuple[Row, str, str]] = {
    "by_selection": (by_selection, "loss", "count"),
    "by_statistics": (by_statistics, "loss", "not-linear"),
    "by_square": (by_square, "loss", "function-of-mean"),
    "by_the_hardest": (by_the_hardest, "loss", "not-linear"),
    "by_torchs_collectives": (functools.partial(by_torchs_collectives, 23), "gradients", "whole-batch"),
    "divided_behind": (divided_behind, "gradients", "sum"),
    "ready_made": (ready_made, "gradients", "uneven"),
    "padded": (padded, "outputs", "padding"),
    "drawn": (drawn, "samples", "collate"),
    "mixed_up": (mixed_up, "inputs", "batch"),
    "by_hand": (by_hand, "gradients", "not-averaged"),
    "cut_short": (cut_short, "gradients", "not-averaged"),
    "beside": (beside, "gradients", "unwrapped"),
    "clamped": (clamped, "gradients", "before-averaging"),
    "centered": (centered, "outputs", "batch"),
    "noisy": (noisy, "outputs", "drawn"),
}
