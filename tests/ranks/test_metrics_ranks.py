"""Metrics and the loader on real ranks, over Lockstep's group and over gloo."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import batch
from lockstep.data import DataLoader
from lockstep.errors import CollectiveMismatch
from lockstep.metrics import Accuracy, Mean, Sum, synchronize
from lockstep.testing import run_ranks

backends = pytest.mark.parametrize("backend", ["gloo", "lockstep"])
worlds = pytest.mark.parametrize("world_size", [1, 2, 3, 5])

NUM_SAMPLES = 23


def classification_data():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(NUM_SAMPLES, 4, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(scores, torch.randint(4, (NUM_SAMPLES,), generator=generator))


def evaluate(batch_size, evaluation):
    """Metrics over a loader, the number of all_reduces it took, and the samples this rank saw."""
    calls = []
    all_reduce = dist.all_reduce

    def counting_all_reduce(*args, **kwargs):
        calls.append(args)
        return all_reduce(*args, **kwargs)

    loss, accuracy, top_3, seen = Mean(), Accuracy(), Accuracy(top_k=3), Sum()
    for scores, targets in DataLoader(classification_data(), batch_size, shuffle=True, evaluation=evaluation):
        loss.update(torch.nn.functional.cross_entropy(scores, targets))
        accuracy.update(scores, targets)
        top_3.update(scores, targets)
        seen.update(len(targets))
    dist.all_reduce = counting_all_reduce
    try:
        results = synchronize({"loss": loss, "accuracy": accuracy, "top_3": top_3, "seen": seen})
        again = synchronize(loss, accuracy)
    finally:
        dist.all_reduce = all_reduce
    return results, again, len(calls), seen.compute()


@backends
@worlds
@pytest.mark.parametrize(("batch_size", "evaluation"), [(8, True), (8, False), (3, True), (3, False)])
def test_global_values_count_every_sample_once(backend, world_size, batch_size, evaluation):
    scores, targets = classification_data().tensors
    outcomes = run_ranks(evaluate, world_size, batch_size, evaluation, backend=backend)
    best = scores.topk(3, 1).indices
    for results, again, calls, _ in outcomes:
        assert results["seen"] == NUM_SAMPLES
        assert results["loss"] == pytest.approx(torch.nn.functional.cross_entropy(scores, targets).item(), rel=1e-12)
        assert results["accuracy"] == (best[:, 0] == targets).sum().item() / NUM_SAMPLES
        assert results["top_3"] == (best == targets[:, None]).any(1).sum().item() / NUM_SAMPLES
        assert again == (results["loss"], results["accuracy"]), "synchronizing does not change the metrics"
        assert calls == (2 if world_size > 1 else 0), "one collective for all metrics of a call"
    assert sum(seen for *_, seen in outcomes) == NUM_SAMPLES


def synchronize_metrics_of_their_own(case):
    rank = dist.get_rank()
    mean, accuracy = Mean(), Accuracy()
    mean.update(float(rank))
    if case == "order of names":
        metrics = {"a": mean, "b": accuracy} if rank == 0 else {"b": accuracy, "a": mean}
    elif case == "nothing seen":
        metrics = {"a": mean if rank == 1 else Mean(), "b": accuracy}
    elif case == "names":
        metrics = {"a": mean, "b": accuracy} if rank == 0 else {"a": mean, "c": accuracy}
    elif case == "kinds":
        metrics = {"a": mean, "b": accuracy} if rank == 0 else {"a": accuracy, "b": mean}
    elif case == "settings":
        metrics = {"b": Accuracy(top_k=1 + rank)}
    else:
        assert case == "number"
        metrics = {"a": mean, "b": accuracy} if rank == 0 else {"a": mean}
    return synchronize(metrics)


@backends
def test_ranks_may_name_metrics_in_any_order_and_have_seen_nothing(backend):
    for case, expected in (("order of names", 1.0), ("nothing seen", 1.0)):
        for results in run_ranks(synchronize_metrics_of_their_own, 3, case, backend=backend):
            assert results["a"] == expected
            assert math.isnan(results["b"])


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("gloo", "names"),
        ("lockstep", "names"),
        ("lockstep", "kinds"),
        ("lockstep", "settings"),
        # gloo cannot be asked: it aborts the process when sizes differ.
        ("lockstep", "number"),
    ],
)
def test_ranks_that_pass_different_metrics_are_told(backend, case):
    for error in run_ranks(synchronize_metrics_of_their_own, 2, case, backend=backend, expect_errors=True):
        assert isinstance(error, CollectiveMismatch), error
        if case != "number":
            assert "ranks passed different metrics" in str(error)
            assert "b: Accuracy" in str(error) or "c: Accuracy" in str(error) or "b: Mean" in str(error)


def accuracy_by_torchmetrics():
    import torchmetrics

    theirs = torchmetrics.classification.MulticlassAccuracy(num_classes=4, average="micro")
    ours = Accuracy()
    for scores, targets in DataLoader(classification_data(), 8, evaluation=True):
        theirs.update(scores, targets)
        ours.update(scores, targets)
    return theirs.compute().item(), synchronize(ours)[0]


@backends
def test_torchmetrics_work_beside(backend):
    for theirs, ours in run_ranks(accuracy_by_torchmetrics, 3, backend=backend):
        assert theirs == pytest.approx(ours, rel=1e-6)  # theirs is a float32


def train_and_evaluate_in_between(batch_size):
    """The gradient of every step by hand: weighted, averaged over ranks; an evaluation before each."""
    torch.manual_seed(1)
    weights = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    evaluation = DataLoader(classification_data(), 6, evaluation=True)
    losses, loss = [], Mean()
    loader = DataLoader(classification_data(), batch_size, shuffle=True, seed=3)
    for _ in range(2):
        for inputs, targets in loader:
            accuracy = Accuracy()
            for evaluated, labels in evaluation:
                accuracy.update(evaluated @ weights, labels)
            step_loss = torch.nn.functional.cross_entropy(inputs @ weights, targets)
            loss.update(step_loss)
            (gradient,) = torch.autograd.grad(step_loss, weights)
            gradient *= batch.hand.current().weight / dist.get_world_size()
            dist.all_reduce(gradient)
            with torch.no_grad():
                weights -= 0.5 * gradient
            losses.append(synchronize({"loss": loss, "accuracy": accuracy}))
            loss.reset()
    return losses, weights.detach()


@backends
@pytest.mark.parametrize("batch_size", [4, 9])
def test_training_by_hand_gives_one_answer(backend, batch_size):
    ((expected, expected_weights),) = run_ranks(train_and_evaluate_in_between, 1, batch_size, backend=backend)
    for world_size in (2, 3, 5):
        for losses, weights in run_ranks(train_and_evaluate_in_between, world_size, batch_size, backend=backend):
            assert (weights - expected_weights).abs().max() < 1e-12
            assert len(losses) == len(expected)
            for got, wanted in zip(losses, expected, strict=True):
                assert got == pytest.approx(wanted, rel=1e-12)


def read_through_a_world(num_workers):
    """The loader is made before the world opens, and follows it."""
    loader = DataLoader(range(10), 4, num_workers=num_workers)
    total = Sum()
    with lockstep.init() as world:
        samples = [loaded.tolist() for loaded in loader]
        total.update(sum(map(sum, samples)))
        assert synchronize(total, process_group=world.process_group) == synchronize(total)
        return samples, synchronize(total)[0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_open_world_is_followed(num_workers):
    first, second = run_ranks(read_through_a_world, 2, num_workers, init=False)
    assert first == ([[0, 1], [4, 5], [8]], 45.0)
    assert second == ([[2, 3], [6, 7], [9]], 45.0)


def evaluate_apart(how):
    """The error of an evaluation, of data that are others on each rank or of a part of it that a rank sees alone."""
    rank, world_size, data = dist.get_rank(), dist.get_world_size(), classification_data()
    generator = torch.Generator().manual_seed(rank if how == "apart" else 0)
    mean, accuracy = Mean(), Accuracy()
    parts = [torch.utils.data.Subset(data, torch.randperm(NUM_SAMPLES, generator=generator)[:10])]
    options = {"evaluation": how != "training"}
    if how == "two, of which one is small":
        parts = [torch.utils.data.Subset(data, [3]), *parts]
    if how == "own":
        parts = [torch.utils.data.Subset(data, range(rank, NUM_SAMPLES, world_size))]
        options = {"evaluation": True, "rank": 0, "world_size": 1}
    for part in parts:
        for scores, targets in DataLoader(part, 4, **options):
            mean.update(torch.nn.functional.cross_entropy(scores, targets))
            accuracy.update(scores, targets)
    try:
        synchronize({"loss": mean})
        synchronize(mean, accuracy)
    except CollectiveMismatch as error:
        return str(error)
    return ""


@backends
def test_values_of_other_data_are_not_added_up(backend):
    for message in run_ranks(evaluate_apart, 3, "apart", backend=backend):
        assert message.startswith("synchronize: metric loss covers different data on each rank")


@pytest.mark.parametrize("how", ["alike", "two, of which one is small", "own", "training"])
def test_values_of_data_that_are_alike_or_a_ranks_own_are(how):
    assert run_ranks(evaluate_apart, 3, how) == [""] * 3


def evaluate_a_rare_class():
    """Two data sets with one sample of it each: rank 0 holds the first's, rank 1 the second's."""
    mean = Mean()
    for first in (0.0, 10.0):
        for values in DataLoader(torch.arange(first, first + 4), 4, evaluation=True):
            if ((values == 0) | (values == 13)).any():
                mean.update(values.mean())
    (value,) = synchronize(mean)
    return value


def test_metrics_that_are_not_updated_with_every_batch():
    assert run_ranks(evaluate_a_rare_class, 2) == [6.5] * 2


def merge_and_load():
    """Whose metrics have other sums than those that they have seen themselves."""
    data = torch.utils.data.TensorDataset(torch.arange(8.0), torch.arange(8) + dist.get_rank())
    seen, loaded, merged = Mean(), Mean(), Mean()
    for values, _ in DataLoader(data, 4, evaluation=True):
        seen.update(values.mean())
    loaded.load_state(seen.state())
    synchronize(loaded)
    merged.merge(seen)
    for metric in (seen, merged):
        with pytest.raises(CollectiveMismatch, match="covers different data on each rank"):
            synchronize(metric)
    merged.update(1.0)
    synchronize(merged)
    seen.reset()
    synchronize(seen)


def test_what_a_metric_has_not_seen_itself_is_not_compared():
    run_ranks(merge_and_load, 2)
