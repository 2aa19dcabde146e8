"""Further rows of docs/same-answer.md: programs that would give another answer, and are refused or warned of."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import random_split

import lockstep
import loops
from lockstep.testing import run_ranks
from loops import Net, loss_of, pairs, sgd
from test_same_answer import (
    CLASSES,
    Site,
    assert_refused,
    assert_same,
    assert_same_only_if_heeded,
    distance,
    steps,
    unheeded,
)


def by_selection(site: Site) -> None:
    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        mask = x[:, 0] > -0.5
        if not site.changes:
            return cross_entropy(model(x)[mask], labels[mask])
        return lockstep.mean(cross_entropy(model(x)[mask], labels[mask], reduction="sum"), mask.sum())

    steps(site, loss, batch_size=12)


def test_means_over_a_selection() -> None:
    assert_same_only_if_heeded(by_selection)


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


def test_statistics_of_a_batch() -> None:
    assert_same_only_if_heeded(by_statistics)


def ready_made(site: Site) -> None:
    """Three batches of 1 to 5 rows make a step, the last one two."""
    x, y = loops.numbers(23)
    sizes = [5, 1, 4, 2, 3, 1, 5, 2]
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
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


def test_ready_made_batches() -> None:
    for world_size in (2, 3):
        assert_same_only_if_heeded(ready_made, world_size)


def of_several_sizes(site: Site) -> None:
    """Five rows, one, seven, two: also with what nothing but its size tells of its batch."""
    place = {"rank": 0, "world_size": 1} if site.alone else {}
    order = iter(torch.randperm(15, generator=torch.Generator().manual_seed(0)).tolist())
    sampler = [list(itertools.islice(order, size)) for size in (5, 1, 7, 2)]
    model = site.wrap(Net())
    optimizer = sgd(model)
    loader = lockstep.DataLoader(pairs(15), batch_sampler=sampler, **place)
    for x, y in itertools.chain(loader, loader):
        for inputs in (x, x * 2):
            optimizer.zero_grad()
            loss_of(model(inputs), y).backward()
            optimizer.step()


def test_batches_of_several_sizes() -> None:
    for world_size in (2, 3):
        assert_same(of_several_sizes, world_size)


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


def by_torchs_collectives(count: int, batch_size: int, site: Site) -> None:
    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        outputs, masks = model(x).sigmoid(), one_hot(labels, CLASSES).double()
        if site.changes:
            outputs, masks = lockstep.all_gather(outputs), lockstep.all_gather(masks)
        hits, sizes = (outputs * masks).sum(0), (outputs + masks).sum(0)
        if not site.alone and not site.heeds:
            hits, sizes = AllGatherGrad.apply(hits).sum(0), AllGatherGrad.apply(sizes).sum(0)
        return (1 - (2 * hits + 1) / (sizes + 1)).mean()

    steps(site, loss, count, batch_size)


def test_losses_over_collectives_of_torch() -> None:
    uneven, even = (functools.partial(by_torchs_collectives, *each) for each in ((23, 6), (24, 6)))
    assert_same_only_if_heeded(uneven)
    assert max(run_ranks(distance, 3, even, False)) <= 1e-12


def with_means_in_a_loss(site: Site) -> None:
    model = site.wrap(Net())
    optimizer = sgd(model)
    for x, y in site.loader(pairs(24), 6):
        loss_of(model(x), y).backward(create_graph=True)
        penalty = sum((each.grad.square().sum() for each in model.parameters()), torch.zeros(()))
        optimizer.zero_grad()
        (loss_of(model(x), y) + 0.1 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_within_a_loss() -> None:
    assert_refused(with_means_in_a_loss, "They are means over the ranks, through which no gradient goes back")


def stepped_by_hooks(site: Site) -> None:
    """Each parameter has an optimizer, which steps when its gradient is there, or behind the backward pass."""
    model = site.wrap(Net())
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    if not site.changes:
        for each in optimizers:
            each.register_post_accumulate_grad_hook(step)
    for x, y in site.loader(pairs(23), 6):
        loss_of(model(x), y).backward()
        if site.changes:
            for each in optimizers:
                step(each)


def test_optimizers_within_the_backward_pass() -> None:
    assert_refused(functools.partial(unheeded, stepped_by_hooks), "the optimizer steps within the backward pass")
    assert_same(stepped_by_hooks)


def attributed(site: Site) -> None:
    """Now and then one rank asks which of some inputs a few outputs depend on."""
    model = site.wrap(Net())
    optimizer = sgd(model)
    for number, (x, y) in enumerate(site.loader(pairs(23), 6)):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        if number % 2 == 0 and (site.alone or dist.get_rank() == 0):
            model.eval()
            for some in (x[:1].clone(), torch.ones(5, 3, dtype=torch.float64)):
                torch.autograd.grad(model(some.requires_grad_()).sum(), some)
            model.train()
        optimizer.step()


def test_gradients_of_an_evaluation() -> None:
    assert_same(attributed)


def divided_behind(site: Site) -> None:
    """As fairseq does: gradients of a sum, divided by what all ranks have counted."""
    torch.manual_seed(2)
    model = site.wrap(nn.Linear(3, 4).double())
    optimizer = sgd(model)
    for x, labels in site.loader(loops.Rows(23, lambda x, y, index: (x, index % 4)), 6):
        optimizer.zero_grad()
        loss, count = cross_entropy(model(x), labels, reduction="sum"), torch.tensor(len(labels)).double()
        (lockstep.global_loss(loss) if site.changes else loss).backward()
        if not site.alone:
            dist.all_reduce(count)
            count /= dist.get_world_size()
        for parameter in model.parameters():
            parameter.grad /= count
        optimizer.step()


def test_gradients_divided_by_hand() -> None:
    assert_same_only_if_heeded(divided_behind)


# ---- data ---------------------------------------------------------------------------------------------


def padded(site: Site, length: int | None) -> None:
    """Sequences of which a model sees the mean over all places, padding too."""

    def collate(samples: list[Any]) -> Any:
        longest = length or max(len(x) for x, _ in samples)
        x = torch.stack([nn.functional.pad(x, (0, 0, 0, longest - len(x))) for x, _ in samples])
        return x, torch.stack([y for _, y in samples])

    dataset = loops.Rows(23, lambda x, y, index: (x.expand(1 + index % 5, 3), y))
    model = site.wrap(Net())
    optimizer = sgd(model)
    for x, y in site.loader(dataset, 6, collate_fn=collate):
        optimizer.zero_grad()
        loss_of(model(x.mean(1)), y).backward()
        optimizer.step()


def test_padding_to_the_longest() -> None:
    assert min(run_ranks(distance, 3, functools.partial(padded, length=None))) > 1e-4
    assert_same(functools.partial(padded, length=5))


def split(site: Site) -> None:
    if not site.alone:
        torch.manual_seed(dist.get_rank())  # as lockstep.init does
    generator = torch.Generator().manual_seed(0) if site.alone or site.heeds else None
    train, _ = random_split(pairs(23), [17, 6], generator=generator)
    loops.train(site, site.loader(train, 6), model := site.wrap(Net()), sgd(model))


def test_random_splits_and_lists_of_files() -> None:
    for backend in ("lockstep", "gloo"):
        assert_refused(functools.partial(unheeded, split), "but of different data", backend=backend)
    assert_same(split)


def drawn(site: Site, by_samples: bool) -> None:
    """Noise on the inputs, of each sample or of what is collated."""

    def with_noise(x: Tensor, y: Tensor, _: int) -> Any:
        return x + torch.randn(3, dtype=torch.float64) if by_samples else x, y

    def collate(samples: list[Any]) -> Any:
        x, y = map(torch.stack, zip(*samples, strict=True))
        return x if by_samples else x + torch.randn(3, dtype=torch.float64), y

    loader = site.loader(loops.Rows(23, with_noise), 6, collate_fn=collate)
    loops.train(site, loader, model := site.wrap(Net()), sgd(model))


def test_draws_that_no_sample_owns() -> None:
    assert min(run_ranks(distance, 3, functools.partial(drawn, by_samples=False))) > 1e-4
    assert_same(functools.partial(drawn, by_samples=True))


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


def test_gradients_taken_by_hand() -> None:
    assert min(run_ranks(distance, 3, by_hand, False)) > 1e-4  # a model of each rank: see tests/ranks/test_drift.py
    assert_same(by_hand)


def scheduled(site: Site) -> None:
    """A learning rate that is lowered where the loss does not fall."""
    loader, model, optimizer = loops.start(site, 23, 6)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for x, y in itertools.islice(itertools.cycle(loader), 20):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step(lockstep.mean(loss * len(y), len(y)) if site.changes else loss)


def test_schedules_by_a_loss() -> None:
    assert_refused(functools.partial(unheeded, scheduled), "have got the same gradients since")
    assert_same(scheduled)


def shaken(site: Site) -> None:
    """Noise on the parameters, as in Langevin dynamics."""
    loader, model, optimizer = loops.start(site, 23, 6)
    if not site.alone:
        torch.manual_seed(dist.get_rank())
    generator = torch.Generator().manual_seed(0) if site.heeds or site.alone else None
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=generator)


def test_noise_on_parameters() -> None:
    assert_refused(functools.partial(unheeded, shaken), "have got the same gradients since")
    assert_same(shaken)


def cut_short(site: Site) -> None:
    model = site.wrap(Net())
    optimizer, loader, window = sgd(model), site.loader(pairs(23), 6), 3
    for number, (x, y) in enumerate(loader):
        is_last = (number + 1) % window == 0
        if number + 1 == len(loader):
            is_last = is_last or site.heeds
        with contextlib.nullcontext() if is_last else site.no_sync(model):
            loss_of(model(x), y).backward()
        if is_last or number + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def test_windows_that_are_cut_short() -> None:
    assert_same_only_if_heeded(cut_short)


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
    if site.alone or site.heeds:
        model: Any = site.wrap(inside)
    else:
        net = lockstep.DistributedDataParallel(inside.net)
        site.models.append(inside)

        def model(x: Tensor, y: Tensor) -> Tensor:
            return loss_of(net(x) * inside.scale, y)

    for x, y in site.loader(pairs(23), 6):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()


def test_parameters_beside_the_model() -> None:
    assert_same_only_if_heeded(beside)


def clamped(site: Site) -> None:
    model = site.wrap(Net())
    optimizer = sgd(model)
    if not (site.alone or site.heeds):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    for x, y in site.loader(pairs(23), 6):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()


def test_hooks_that_are_not_linear() -> None:
    assert_same_only_if_heeded(clamped)


def penalised(site: Site, drop_last: bool) -> None:
    model = site.wrap(Net())
    optimizer = sgd(model)
    for x, y in site.loader(pairs(23), 6, drop_last=drop_last):
        optimizer.zero_grad()
        x.requires_grad_()
        output = model(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (loss_of(output, y) + gradient.square().sum(1).mean()).backward()
        optimizer.step()


def test_terms_that_do_not_come_by_the_outputs() -> None:
    assert_refused(functools.partial(penalised, drop_last=False), "create_graph=True")
    assert_same(functools.partial(penalised, drop_last=True))


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
    loops.train(site, site.loader(pairs(23), 6), model := site.wrap(Centered(site)), sgd(model))


def test_buffers_that_a_batch_changes() -> None:
    assert_same_only_if_heeded(centered)


class Noisy(Net):
    """Takes noise off its inputs that the script draws."""

    def __init__(self) -> None:
        super().__init__()
        self.noise: Tensor
        self.register_buffer("noise", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.noise)


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


def test_buffers_that_the_script_writes() -> None:
    assert_same_only_if_heeded(noisy)


def renormalised(site: Site) -> None:
    torch.manual_seed(2)
    is_plain = site.alone or site.heeds
    embedding = nn.Embedding(8, 3, max_norm=None if is_plain else 0.5)
    model = site.wrap(nn.Sequential(embedding, nn.Linear(3, 1)).double())
    optimizer = sgd(model)
    dataset = loops.Rows(23, lambda x, y, index: (torch.tensor(index % 8), y))
    for index, y in itertools.chain(site.loader(dataset, 6), site.loader(dataset, 6)):
        optimizer.zero_grad()
        loss_of(model(index), y).backward()
        optimizer.step()
        with torch.no_grad():
            embedding.weight.renorm_(2, 0, 0.5)


def test_embeddings_that_renormalise() -> None:
    assert_refused(functools.partial(unheeded, renormalised), "Embedding(max_norm=0.5)")
    assert_same(renormalised)
