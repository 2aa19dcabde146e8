"""Loader, engine and metrics of a whole job, on ranks that are threads: what one process computes, in milliseconds."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import lockstep
from lockstep.data import DataLoader
from lockstep.errors import CollectiveMismatch
from lockstep.metrics import Accuracy, Mean, Metric, Sum, synchronize
from thread_team import run_threads

NUM_SAMPLES = 23
worlds = pytest.mark.parametrize("world_size", [2, 3])
# The last batches are of 7 samples and of one: neither 2 nor 3 divides them, and of one sample ranks get fillers.
batch_sizes = pytest.mark.parametrize("batch_size", [8, 2])


def on_threads(body: Any, world_size: int) -> list[Any]:
    """What `body(rank)` returns on each rank; raises what a rank has raised."""
    results = run_threads(body, world_size)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (NUM_SAMPLES,), generator=generator))


def make_model() -> nn.Module:
    """The same in each thread: all of them draw from one generator."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


# ---- the loader --------------------------------------------------------------------------------------


@worlds
@batch_sizes
def test_ranks_hold_the_batches_of_one_process(world_size: int, batch_size: int) -> None:
    def read(_: int) -> list[list[int]]:
        loader = DataLoader(range(NUM_SAMPLES), batch_size, shuffle=True, seed=4)
        return [[] if lockstep.is_filler(loaded) else loaded.tolist() for _ in range(2) for loaded in loader]

    parts = on_threads(read, world_size)
    alone = DataLoader(range(NUM_SAMPLES), batch_size, shuffle=True, seed=4, rank=0, world_size=1)
    expected = [loaded.tolist() for _ in range(2) for loaded in alone]
    assert [list(itertools.chain(*shares)) for shares in zip(*parts, strict=True)] == expected


@worlds
def test_one_process_goes_on_where_ranks_have_stopped(world_size: int) -> None:
    def read(_: int) -> tuple[int, dict[str, Any]]:
        loader = DataLoader(range(NUM_SAMPLES), 8, shuffle=True)
        first = next(iter(loader))
        return first.sum().item(), loader.state_dict()

    sums, states = zip(*on_threads(read, world_size), strict=True)
    assert all(state == states[0] for state in states)
    alone = DataLoader(range(NUM_SAMPLES), 8, shuffle=True, rank=0, world_size=1)
    alone.load_state_dict(states[0])
    rest = [loaded.tolist() for loaded in alone]
    assert [len(loaded) for loaded in rest] == [8, 7]
    assert sum(sums) + sum(map(sum, rest)) == sum(range(NUM_SAMPLES))


# ---- metrics -----------------------------------------------------------------------------------------


@worlds
@batch_sizes
@pytest.mark.parametrize("evaluation", [True, False])
def test_metrics_count_every_sample_once(world_size: int, batch_size: int, evaluation: bool) -> None:
    def evaluate(_: int) -> dict[str, float]:
        metrics: dict[str, Any] = {"loss": Mean(), "accuracy": Accuracy(), "top_2": Accuracy(top_k=2), "seen": Sum()}
        data = TensorDataset(*make_data().tensors, torch.ones(NUM_SAMPLES))
        for scores, targets, ones in DataLoader(data, batch_size, shuffle=True, evaluation=evaluation):
            # Tensors of the batch tell a filler, which counts nothing.
            metrics["loss"].update(cross_entropy(scores[:, :3], targets, reduction="none"), weight=ones)
            metrics["accuracy"].update(scores[:, :3], targets)
            metrics["top_2"].update(scores[:, :3], targets)
            metrics["seen"].update(ones)
        return synchronize(metrics)

    scores, targets = make_data().tensors
    best = scores[:, :3].topk(2, 1).indices == targets[:, None]
    for values in on_threads(evaluate, world_size):
        assert values["seen"] == NUM_SAMPLES
        assert values["accuracy"] == best[:, 0].sum().item() / NUM_SAMPLES
        assert values["top_2"] == best.any(1).sum().item() / NUM_SAMPLES
        assert values["loss"] == pytest.approx(cross_entropy(scores[:, :3], targets).item(), rel=1e-12)


@worlds
def test_ranks_may_name_metrics_in_any_order_and_have_seen_nothing(world_size: int) -> None:
    def run(rank: int) -> dict[str, float]:
        mean, accuracy = Mean(), Accuracy()
        if rank:
            mean.update(float(rank))
        metrics: dict[str, Metric] = {"a": mean, "b": accuracy}
        return synchronize(dict(reversed(metrics.items())) if rank == 1 else metrics)

    for values in on_threads(run, world_size):
        assert values["a"] == sum(range(world_size)) / (world_size - 1)
        assert math.isnan(values["b"])


@worlds
def test_ranks_that_pass_different_metrics_are_told(world_size: int) -> None:
    def run(rank: int) -> None:
        with pytest.raises(CollectiveMismatch, match=f"This rank \\({rank} of {world_size}\\)"):
            synchronize({"a": Mean(), "b" if rank else "c": Accuracy()})

    assert on_threads(run, world_size) == [None] * world_size


# ---- the engine over the loader ----------------------------------------------------------------------


def train(model: nn.Module, loader: DataLoader[Any], accumulate: int) -> list[Tensor]:
    """The gradient of every parameter after each step of two epochs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    gradients = []
    for _ in range(2):
        for number, (inputs, targets) in enumerate(loader, 1):
            is_step = number % accumulate == 0 or number == len(loader)
            is_left = isinstance(model, lockstep.DistributedDataParallel) and not is_step
            with model.no_sync() if is_left else contextlib.nullcontext():
                cross_entropy(model(inputs), targets).backward()
            if is_step:
                gradients += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
    return gradients


@worlds
@batch_sizes
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_those_of_one_process(world_size: int, batch_size: int, accumulate: int) -> None:
    def run(_: int) -> list[Tensor]:
        model = lockstep.DistributedDataParallel(make_model())
        return train(model, DataLoader(make_data(), batch_size, shuffle=True), accumulate)

    first, *others = on_threads(run, world_size)
    alone = DataLoader(make_data(), batch_size, shuffle=True, rank=0, world_size=1)
    expected = train(make_model(), alone, accumulate)
    assert len(first) == len(expected)
    for gradient, wanted in zip(first, expected, strict=True):
        assert torch.allclose(gradient, wanted, rtol=0, atol=1e-12)  # ranks add in another order
    for other in others:
        assert all(map(torch.equal, first, other)), "bit for bit the same on all ranks"


@worlds
def test_a_step_left_for_later_is_each_ranks_own(world_size: int) -> None:
    def first_gradients(model: nn.Module, loader: DataLoader[Any]) -> list[Tensor]:
        inputs, targets = next(iter(loader))
        is_engine = isinstance(model, lockstep.DistributedDataParallel)
        with model.no_sync() if is_engine else contextlib.nullcontext():
            cross_entropy(model(inputs), targets).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def run(_: int) -> list[Tensor]:
        return first_gradients(lockstep.DistributedDataParallel(make_model()), DataLoader(make_data(), 6))

    for rank, gradients in enumerate(on_threads(run, world_size)):
        own_part = DataLoader(make_data(), 6, rank=rank, world_size=world_size)
        assert all(map(torch.equal, gradients, first_gradients(make_model(), own_part)))


@worlds
def test_losses_that_are_no_mean_over_samples(world_size: int) -> None:
    """A mean over the targets that are not ignored; ranks hold different numbers of them."""

    def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        counted = targets != 2
        losses = cross_entropy(model(inputs), targets, reduction="none") * counted
        return lockstep.mean(losses.sum(), counted.sum())

    def run(_: int) -> tuple[list[float], list[Tensor]]:
        model = lockstep.DistributedDataParallel(make_model())
        losses = []
        for inputs, targets in DataLoader(make_data(), 8):
            loss = loss_of(model, inputs, targets)
            loss.backward()
            losses.append(loss.item())
        return losses, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    model = make_model()
    expected = []
    for inputs, targets in zip(*(tensor.split(8) for tensor in make_data().tensors), strict=True):
        loss = cross_entropy(model(inputs), targets, ignore_index=2)
        loss.backward()
        expected.append(loss.item())
    for losses, gradients in on_threads(run, world_size):
        assert losses == pytest.approx(expected, rel=1e-12)
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            assert torch.allclose(gradient, parameter.grad, rtol=0, atol=1e-12)  # type: ignore[arg-type]


@worlds
def test_a_metric_knows_the_batch_of_an_engines_loss(world_size: int) -> None:
    def run(_: int) -> float:
        model, loss = lockstep.DistributedDataParallel(make_model()), Mean()
        for inputs, targets in DataLoader(make_data(), 2):
            step_loss = cross_entropy(model(inputs), targets)
            loss.update(step_loss)  # no weight: the graph tells it, and that a filler has none
            step_loss.backward()
        return synchronize(loss)[0]

    inputs, targets = make_data().tensors
    expected = cross_entropy(make_model()(inputs), targets).item()
    assert on_threads(run, world_size) == pytest.approx([expected] * world_size, rel=1e-12)
