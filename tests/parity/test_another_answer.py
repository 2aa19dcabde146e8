"""Further rows of docs/same-answer.md: what to write makes each the same.

Programs that are refused at run time, where the row is not heeded, are here, with words of the error. The others are in
tests/verify/another_answers.py, where `lockstep verify` names the stage at which they part from one process.
"""

from __future__ import annotations

import functools
import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import random_split

import another_answers
import lockstep
import loops
from lockstep.testing import run_ranks
from loops import Net, loss_of, pairs, sgd
from test_same_answer import (
    Site,
    assert_refused,
    assert_same,
    distance,
    unheeded,
)


def test_means_over_a_selection() -> None:
    assert_same(another_answers.by_selection)


def test_statistics_of_a_batch() -> None:
    for training in (another_answers.by_statistics, another_answers.by_square, another_answers.by_the_hardest):
        assert_same(training)


def test_ready_made_batches() -> None:
    for world_size in (2, 3):
        assert_same(another_answers.ready_made, world_size)


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


def test_losses_over_torch_collectives() -> None:
    uneven, even = (functools.partial(another_answers.by_torchs_collectives, count) for count in (23, 24))
    assert_same(uneven)
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


def test_gradients_in_a_loss() -> None:
    assert_refused(with_means_in_a_loss, "These are means over the ranks, and no gradient flows back through them")


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


def test_optimizers_that_step_during_the_backward_pass() -> None:
    assert_refused(functools.partial(unheeded, stepped_by_hooks), "the optimizer steps during the backward pass")
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


def test_gradients_during_evaluation() -> None:
    assert_same(attributed)


def test_manually_divided_gradients() -> None:
    assert_same(another_answers.divided_behind)


# ---- data ---------------------------------------------------------------------------------------------


def test_padding_to_the_longest_sample() -> None:
    assert_same(another_answers.padded)


def split(site: Site) -> None:
    if not site.alone:
        torch.manual_seed(dist.get_rank())  # as lockstep.init does
    generator = torch.Generator().manual_seed(0) if site.alone or site.heeds else None
    train, _ = random_split(pairs(23), [17, 6], generator=generator)
    loops.train(site, site.loader(train, 6), model := site.wrap(Net()), sgd(model))


def test_random_splits_and_lists_of_files() -> None:
    for backend in ("lockstep", "gloo"):
        assert_refused(functools.partial(unheeded, split), "but with different data", backend=backend)
    assert_same(split)


def test_random_draws_not_tied_to_a_sample() -> None:
    assert_same(another_answers.drawn)


# ---- the loop -----------------------------------------------------------------------------------------


def test_manually_computed_gradients() -> None:
    assert_same(another_answers.by_hand)


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


def test_schedules_based_on_a_loss() -> None:
    assert_refused(functools.partial(unheeded, scheduled), "have received the same gradients since")
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
    assert_refused(functools.partial(unheeded, shaken), "have received the same gradients since")
    assert_same(shaken)


def test_incomplete_accumulation_windows() -> None:
    assert_same(another_answers.cut_short)


def test_parameters_outside_the_model() -> None:
    assert_same(another_answers.beside)


def test_nonlinear_hooks() -> None:
    assert_same(another_answers.clamped)


class Penalised(nn.Module):
    """Returns a penalty of each sample beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        output = self.net(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output, (gradient.norm(dim=1) - 1) ** 2


def penalised(site: Site, in_forward: bool) -> None:
    model = site.wrap(Penalised() if in_forward else Net())
    optimizer = sgd(model)
    for x, y in site.loader(pairs(23), 6):
        optimizer.zero_grad()
        if in_forward:
            output, penalty = model(x)
        else:
            x.requires_grad_()
            output = model(x)
            (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            penalty = (gradient.norm(dim=1) - 1) ** 2
        (loss_of(output, y) + penalty.mean()).backward()
        optimizer.step()


def test_loss_terms_not_computed_from_the_outputs() -> None:
    assert_refused(functools.partial(penalised, in_forward=False), "create_graph=True")
    for world_size in (2, 3):
        assert_same(functools.partial(penalised, in_forward=True), world_size)


def test_mixup_and_cutmix() -> None:
    for world_size in (2, 3):
        assert_same(another_answers.mixed_up, world_size)


# ---- layers -------------------------------------------------------------------------------------------


def test_buffers_updated_from_a_batch() -> None:
    assert_same(another_answers.centered)


def test_buffers_written_by_the_script() -> None:
    assert_same(another_answers.noisy)


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


def test_embeddings_with_a_maximum_norm() -> None:
    assert_refused(functools.partial(unheeded, renormalised), "Embedding(max_norm=0.5)")
    assert_same(renormalised)
