"""Metrics in loops that fetch ahead, or have several loaders at work: one process's value, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import InputError
from lockstep.metrics import Accuracy, Mean, synchronize
from lockstep.testing import run_ranks

TOLERANCE = 1e-12
WORLDS = (1, 2, 3, 5)


def dataset(count: int = 23) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count, 3, generator=generator, dtype=torch.float64), torch.randint(4, (count,), generator=generator)
    )


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 4).double()


def ahead(batches: Iterable[Any], change: Callable[[Any], Any] = lambda batch: batch) -> Iterator[Any]:
    waiting: list[Any] = []
    for batch in batches:
        waiting.append(change(batch))
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def copied(batch: Any) -> Any:
    return [tensor.clone() for tensor in batch]


def expected(model: nn.Module, count: int = 23) -> list[float]:
    x, y = dataset(count).tensors
    logits = model(x)
    return [
        nn.functional.cross_entropy(logits, y).item(),
        (logits.argmax(1) == y).double().mean().item(),
    ]


class Values:
    """A loss and an accuracy, and how far they are from those of one process."""

    def __init__(self) -> None:
        self.loss, self.accuracy = Mean(), Accuracy()

    def update(self, logits: Tensor, y: Tensor, **options: Any) -> None:
        self.loss.update(nn.functional.cross_entropy(logits, y), **options)
        self.accuracy.update(logits, y)

    def error(self, model: nn.Module, count: int = 23) -> float:
        got = synchronize(self.loss, self.accuracy)
        return max(abs(one - other) for one, other in zip(got, expected(model, count), strict=True))


def by_an_engine() -> list[float]:
    """Forward passes of the engine tell the batch, fetched ahead, trained on or not, and transformed or not."""
    errors = []
    for change, count in ((lambda batch: batch, 23), (copied, 21)):
        for trains in (True, False):
            values, model = Values(), make_model()
            engine = lockstep.DistributedDataParallel(model)
            for x, y in ahead(lockstep.DataLoader(dataset(count), 6, shuffle=True), change):
                with torch.set_grad_enabled(trains):
                    logits = engine(x)
                values.update(logits, y)
                if trains:
                    logits.mean().backward()
            errors.append(values.error(model, count))
    return errors


def by_the_bare_model() -> list[float]:
    errors = []
    for options in ({}, {"evaluation": True}):
        for change in (lambda batch: batch, copied):
            values, model = Values(), make_model()
            for batch in lockstep.DataLoader(dataset(), 6, shuffle=True, **options):
                x, y = change(batch)
                values.update(model(x).detach(), y)
            errors.append(values.error(model))
    return errors


def inside_of_training() -> list[float]:
    """A training batch, and at the end a filler, is in hand while another loader evaluates."""
    errors = []
    for held_out in (
        lambda: lockstep.DataLoader(dataset(), 4, evaluation=True),
        lambda: lockstep.DataLoader(dataset(), 4),
    ):
        model = make_model()
        for _ in lockstep.DataLoader(dataset(7), 6):
            values = Values()
            for x, y in held_out():
                values.update(model(x).detach(), y)
            errors.append(values.error(model))
    return errors


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("loop", [by_an_engine, by_the_bare_model, inside_of_training])
def test_values_are_those_of_one_process(loop: Callable[[], list[float]], world_size: int) -> None:
    for errors in run_ranks(loop, world_size):
        assert max(errors) <= TOLERANCE, errors


def look_ahead_without_an_engine(with_weights: bool) -> float:
    values, model = Values(), make_model()
    for x, y in ahead(lockstep.DataLoader(dataset(), 8, shuffle=True, evaluation=True)):
        values.update(model(x).detach(), y, **({"weight": len(y)} if with_weights else {}))
    return values.error(model)


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_scalar_behind_a_look_ahead_needs_its_weight(world_size: int) -> None:
    assert max(run_ranks(look_ahead_without_an_engine, world_size, True)) <= TOLERANCE
    for outcome in run_ranks(look_ahead_without_an_engine, world_size, False, expect_errors=True):
        assert isinstance(outcome, lockstep.LockstepError) or outcome <= TOLERANCE
        if isinstance(outcome, InputError):
            assert "Mean.update(loss, weight=len(labels))" in str(outcome)
    assert world_size > 1 or isinstance(outcome, InputError)


def two_batches_in_a_step(with_weights: bool) -> float:
    """The loss of the first batch is measured when the second has gone through the engine."""
    values, engine = Values(), lockstep.DistributedDataParallel(make_model())
    pairs = zip(lockstep.DataLoader(dataset(), 6), lockstep.DataLoader(dataset(16), 4), strict=True)
    for (x, y), (u, _) in pairs:
        loss = nn.functional.cross_entropy(engine(x), y)
        (loss + engine(u).square().mean()).backward()
        values.loss.update(loss.item(), **({"weight": len(y)} if with_weights else {}))
    return abs(synchronize(values.loss)[0] - expected(engine.module)[0])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_number_of_one_of_two_batches_needs_its_weight(world_size: int) -> None:
    assert max(run_ranks(two_batches_in_a_step, world_size, True)) <= TOLERANCE
    outcomes = run_ranks(two_batches_in_a_step, world_size, False, expect_errors=True)
    assert all(isinstance(outcome, lockstep.LockstepError) for outcome in outcomes), outcomes
    told = [str(outcome) for outcome in outcomes if isinstance(outcome, InputError)]  # who holds as many of both cannot
    assert told
    assert all("Mean.update(loss, weight=len(labels))" in text for text in told)


def evaluate_by_torch() -> list[float]:
    """torch's loader gives every rank all data, while the training loader's last batch is a filler on some."""
    model, found = make_model(), []
    for _ in lockstep.DataLoader(dataset(7), 6):
        accuracy, loss = Accuracy(), Mean()
        for x, y in torch.utils.data.DataLoader(dataset(), 4):
            logits = model(x).detach()
            accuracy.update(logits, y)
            loss.update(nn.functional.cross_entropy(logits, y, reduction="none"))
        found += [accuracy.compute(), loss.compute()]
    right = expected(model)
    return [abs(value - right[(place + 1) % 2]) for place, value in enumerate(found)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_loader_of_torch_is_not_taken_for_the_filler_of_another(world_size: int) -> None:
    for errors in run_ranks(evaluate_by_torch, world_size):
        assert max(errors) <= TOLERANCE, errors


def train_and_evaluate(held_out: Callable[[], Iterable[Any]], change: Callable[[Tensor], Tensor]) -> float:
    """On some ranks the training loader's last batch is a filler of one row."""
    engine, training = lockstep.DistributedDataParallel(make_model()), lockstep.DataLoader(dataset(7), 6)
    for x, y in training:
        nn.functional.cross_entropy(engine(x), y).backward()
    engine.eval()
    values = Values()
    with torch.no_grad():
        for x, y in held_out():
            values.update(engine(change(x)), y)
    return values.error(engine.module)


def evaluate_by_torch_through_the_engine() -> float:
    """One row for each batch."""
    own = torch.utils.data.Subset(dataset(), range(dist.get_rank(), 23, dist.get_world_size()))
    return train_and_evaluate(lambda: torch.utils.data.DataLoader(own, 1), lambda x: x)


def evaluate_what_is_computed_from_batches() -> float:
    """The last share of the evaluation's loader is one row."""
    return train_and_evaluate(lambda: lockstep.DataLoader(dataset(), 3, evaluation=True), lambda x: x * 1.0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("loop", [evaluate_by_torch_through_the_engine, evaluate_what_is_computed_from_batches])
def test_one_row_is_not_taken_for_a_filler(loop: Callable[[], float], world_size: int) -> None:
    assert max(run_ranks(loop, world_size)) <= TOLERANCE
