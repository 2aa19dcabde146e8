"""Mistakes with `DistributedDataParallel` that would end in a training that only seems to be right."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_checks import (
    TOLERANCE,
    Heads,
    assert_same_on_all_ranks,
    backends,
    data,
    error_of,
    mean_over_ranks,
    mlp,
    num_collectives,
    twins,
    warnings_of_lockstep,
)
from lockstep import DataLoader, DistributedDataParallel, batch
from lockstep.errors import ModelError, ModelMismatch
from lockstep.testing import run_ranks

# ---- gradients past the engine ---------------------------------------------------------------------------------


def go_past_the_engine(way: str) -> str:
    """Two averagings, and between them a step by gradients of this rank alone."""
    torch.manual_seed(0)
    model = DistributedDataParallel(mlp().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = data(2, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    model(data(2, 4)).sum().backward()
    if way == "inner module":
        model.module(data(2, 4)).sum().backward()
    elif way == "graph of a gradient":
        gradient.square().sum().backward()
    elif way == "regulariser":
        sum(parameter.square().sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    try:
        for _ in range(5):
            optimizer.zero_grad()
            model(data(2, 4)).sum().backward()
    except ModelMismatch as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", ["inner module", "graph of a gradient"])
def test_gradients_past_the_engine_are_an_error_in_the_next_averaging(way: str) -> None:
    for error in run_ranks(go_past_the_engine, 2, way):
        assert error.startswith("ranks hold different values of ")
        assert "Since then, gradients bypassed DistributedDataParallel" in error
        assert "Call model(x)" in error


def test_they_are_over_other_groups_too() -> None:
    for error in run_ranks(go_past_the_engine, 2, "inner module", backend="gloo"):
        assert "ranks hold different values of " in error


@backends
def test_a_regulariser_may_have_a_backward_pass_of_its_own(backend: str) -> None:
    assert run_ranks(go_past_the_engine, 2, "regulariser", backend=backend) == ["", ""]


def count_comparisons() -> list[int]:
    """Averagings behind a regulariser's backward pass, whose gradients are the same on all ranks."""
    model = DistributedDataParallel(mlp().double())
    found = []
    for _ in range(6):
        sum(parameter.square().sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
        model.zero_grad()
        begin = num_collectives()
        model(data(2, 4)).sum().backward()
        found.append(num_collectives() - begin)
    return found


def test_gradients_that_are_the_same_are_soon_not_looked_at() -> None:
    first, *rest = run_ranks(count_comparisons, 2)[0]
    assert [first, *rest] == [2, 2, 2, 1, 1, 1]


def look_behind_the_backward_pass() -> int:
    """One rank shows what the model makes of something, with a graph, before all step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(mlp().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(data(2, 4)).square().mean().backward()
        if dist.get_rank() == 0:
            model.eval()
            model(data(1, 4))
            model.train()
        optimizer.step()
    assert_same_on_all_ranks(*model.parameters())
    return num_collectives()


def test_one_rank_may_look_at_the_model_before_the_step() -> None:
    """The optimizer then starts no collective on that rank alone."""
    one, *others = run_ranks(look_behind_the_backward_pass, 3)
    assert others == [one] * 2


def attribute(kind: str, create_graph: bool, num_samples: int = 27, batch_size: int = 8) -> str:
    """One rank wants gradients of inputs from a model in evaluation mode, now and then, of what it likes."""
    torch.manual_seed(0)
    model = DistributedDataParallel(mlp().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs in DataLoader(TensorDataset(torch.ones(num_samples, 4, dtype=torch.float64)), batch_size):
        if dist.get_rank() == 0:
            model.eval()
            some = inputs[0].clone() if kind == "batch" else torch.ones(5, 4, dtype=torch.float64)
            some = inputs[0][:3] if kind == "slice" else some[:2] if kind == "ambiguous" else some
            chosen = some.requires_grad_()
            (first,) = torch.autograd.grad(model(chosen).sum(), chosen, create_graph=create_graph)
            if create_graph:
                (second,) = torch.autograd.grad(first.square().sum(), chosen, create_graph=True)
                assert second.abs().sum() > 0
                second.sum().backward(inputs=[chosen])
            model.train()
        optimizer.zero_grad()
        model(inputs[0].detach()).mean().backward()
        optimizer.step()
    assert_same_on_all_ranks(*model.parameters())
    return ""


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("kind", ["slice", "batch", "other"])
def test_gradients_of_inputs_in_evaluation_mode_are_a_ranks_own_business(kind: str, create_graph: bool) -> None:
    assert run_ranks(attribute, 2, kind, create_graph) == [""] * 2


@pytest.mark.parametrize("create_graph", [False, True])
def test_they_are_where_one_size_stands_for_two_batches(create_graph: bool) -> None:
    """Rank 0 has two samples of batches of 6 and of 5, so the ranks must ask each other: in training alone."""
    assert run_ranks(attribute, 4, "ambiguous", create_graph, 23, 6) == [""] * 4


def penalise_in_evaluation_mode(num_samples: int, kind: str) -> str:
    """A gradient penalty of a model that trains in evaluation mode, as with frozen normalization."""
    torch.manual_seed(0)
    model = DistributedDataParallel(mlp().double()).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (inputs,) in DataLoader(TensorDataset(torch.arange(num_samples * 4.0).double().view(-1, 4)), 4):
        inputs.requires_grad_()
        output = model(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        penalty = slope.square().mean() if kind != "third" else sum_of_squares_of_second(slope, inputs)
        loss = penalty if kind == "alone" else output.mean() + penalty
        if kind == "alone":
            loss = loss + 0.0 * sum(parameter.sum() for parameter in model.parameters())
        try:
            loss.backward()
        except ModelError as error:
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
    return ""


def sum_of_squares_of_second(slope: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    (second,) = torch.autograd.grad(slope.square().sum(), inputs, create_graph=True)
    return second.square().mean()


@pytest.mark.parametrize("kind", ["alone", "beside", "third"])
def test_a_gradient_penalty_in_evaluation_mode_is_refused_when_it_reaches_parameters(kind: str) -> None:
    assert run_ranks(penalise_in_evaluation_mode, 2, 8, kind) == ["", ""]
    for error in run_ranks(penalise_in_evaluation_mode, 2, 7, kind):
        assert error.startswith("a gradient with create_graph=True (as for a gradient penalty)")


def train_in_evaluation_mode(kind: str) -> str:
    model = DistributedDataParallel(nn.Linear(4, 1).double()).eval()
    for inputs in DataLoader(TensorDataset(torch.ones(27, 4, dtype=torch.float64)), 8):
        some = inputs[0][:3] if kind == "slice" else torch.ones(5, 4, dtype=torch.float64)
        output = model(some)  # no error yet
        return str(error_of(output.mean().backward))
    return "no batch"


@pytest.mark.parametrize(
    ("kind", "words"), [("slice", "uses 3 of this rank's 4 samples"), ("other", "cannot tell how many")]
)
def test_gradients_of_parameters_in_evaluation_mode_are_not(kind: str, words: str) -> None:
    assert all(words in error for error in run_ranks(train_in_evaluation_mode, 2, kind))


def penalise(num_samples: int) -> str:
    model = DistributedDataParallel(mlp().double())
    for (inputs,) in DataLoader(TensorDataset(torch.arange(num_samples * 4.0).double().view(-1, 4)), 4):
        inputs.requires_grad_()
        output = model(inputs)
        try:
            torch.autograd.grad(output.sum(), inputs, create_graph=True)
        except ModelError as error:
            return str(error)
        output.mean().backward()
    return ""


def test_a_gradient_penalty_on_a_batch_that_the_ranks_do_not_divide_is_an_error() -> None:
    assert run_ranks(penalise, 2, 8) == ["", ""]
    for error in run_ranks(penalise, 2, 7):
        assert error.startswith("a gradient with create_graph=True (as for a gradient penalty)")
        assert error.endswith("Compute the gradient in forward(), and return the term for each sample")


def accumulate(model: DistributedDataParallel) -> None:
    with model.no_sync():
        model(data(2, 4)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()


def accumulate_then_average(model: DistributedDataParallel) -> None:
    with model.no_sync():
        model(data(2, 4)).sum().backward()
    model(data(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def average_what_strayed(model: DistributedDataParallel) -> None:
    model.module(data(2, 4)).sum().backward()
    model(data(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def drop_what_strayed(model: DistributedDataParallel) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.module(data(2, 4)).sum().backward()
    optimizer.zero_grad()
    model(data(2, 4)).sum().backward()
    optimizer.step()


def several_passes(model: DistributedDataParallel) -> None:
    output = model(data(2, 4)).sum()
    output.backward(retain_graph=True)
    output.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def step_others(model: DistributedDataParallel) -> None:
    model.module(data(2, 4)).sum().backward()
    other = nn.Linear(2, 1)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()


def count_collectives(step: Callable[[DistributedDataParallel], None]) -> int:
    """Those that the step makes beyond what averaging takes."""
    counts = []
    for body in (step, lambda model: model(data(2, 4)).sum().backward()):
        model = DistributedDataParallel(mlp().double())
        before = num_collectives()
        body(model)
        counts.append(num_collectives() - before)
    return counts[0] - counts[1]


# The first averaging also compares the parameters.
LEGITIMATE = {accumulate: -2, accumulate_then_average: 0, average_what_strayed: 0, drop_what_strayed: 0}


@pytest.mark.parametrize("step", LEGITIMATE, ids=lambda step: step.__name__)
def test_what_no_sync_leaves_and_what_was_averaged_is_not_looked_at(step: Callable[..., None]) -> None:
    found = run_ranks(count_collectives, 2, step)
    assert [min(count, 0) for count in found] == [LEGITIMATE[step]] * 2
    assert max(found) <= 0


@pytest.mark.parametrize("step", [several_passes, step_others], ids=lambda step: step.__name__)
def test_steps_that_are_right(step: Callable[..., None]) -> None:
    run_ranks(count_collectives, 2, step)


def put_means_into_a_loss(is_alone: bool) -> str:
    """A penalty on what `backward(create_graph=True)` has left in `.grad`, with and without a loss beside it."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double())
    model(data(2, 4)).square().mean().backward(create_graph=True)
    penalty = sum((each.grad.square().sum() for each in model.parameters()), torch.zeros(()))
    loss = penalty if is_alone else model(data(2, 4)).mean() + penalty
    model.zero_grad()
    return str(error_of(loss.backward))


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_loss_of_means_is_an_error(is_alone: bool) -> None:
    for error in run_ranks(put_means_into_a_loss, 2, is_alone):
        assert "a loss contains `.grad` of a model's parameters" in error


def keep_a_graph_for_nothing() -> None:
    """Nobody uses the graph: training continues as without one."""
    one, other = twins(mlp())
    for each, create_graph in ((one, True), (other, False)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            each(data(2, 4)).square().mean().backward(create_graph=create_graph)
            if each is other:
                for parameter in other.parameters():
                    parameter.grad = mean_over_ranks(parameter.grad)
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
    for mine, yours in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, yours)


def test_a_graph_that_nobody_uses_changes_nothing() -> None:
    run_ranks(keep_a_graph_for_nothing, 2)


def step_within_the_backward_pass(world_size: int) -> tuple[str, bool]:
    """Each parameter has an optimizer, which steps as soon as its gradient is there."""
    model = DistributedDataParallel(mlp().double())
    before = [each.detach().clone() for each in model.parameters()]
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)
    backward = model(data(2, 4)).square().mean().backward
    error = "" if world_size == 1 else str(error_of(backward))
    if world_size == 1:
        backward()
    changed = [not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)]
    return error, all(changed)


@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_within_the_backward_pass_are_an_error_on_several_ranks(world_size: int) -> None:
    for error, changed in run_ranks(step_within_the_backward_pass, world_size, world_size):
        assert ("steps during the backward pass, with this rank's own gradients" in error) == (world_size > 1)
        assert changed == (world_size == 1)


class Offset(nn.Module):
    """Its first parameter, whose gradient would come last, takes part in nothing but the sum of outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.offset = nn.Parameter(torch.zeros(4))
        self.inner = mlp()
        self.kept: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.inner(inputs)
        self.kept = features.square().mean()
        return features.sum() + self.offset.sum()


def penalise_gradients(steps: int, **options: Any) -> float | str:
    """Backward passes that go by the outputs, by the graph of a gradient: how far from the mean, or the error."""
    model, plain = twins(Offset(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worst = 0.0
    for step in range(steps):
        inputs = data(5, 4, seed=step).requires_grad_()
        for each in (model, plain):
            each.zero_grad()
            if step == steps - 1:
                (gradient,) = torch.autograd.grad(each(inputs), inputs, create_graph=True)
                gradient.square().sum().backward()
            else:
                each(inputs).backward()
        for own in plain.parameters():
            if own.grad is not None:
                dist.all_reduce(own.grad)
        if not options:
            return str(error_of(optimizer.step))
        for ours, own in zip(model.parameters(), plain.parameters(), strict=True):
            expected = torch.zeros_like(ours) if own.grad is None else own.grad / dist.get_world_size()
            found = torch.zeros_like(ours) if ours.grad is None else ours.grad
            worst = max(worst, (found - expected).abs().max().item())
    return worst


@pytest.mark.parametrize("steps", [1, 6])
def test_a_penalty_on_gradients_alone_is_averaged(steps: int) -> None:
    assert max(run_ranks(penalise_gradients, 2, steps, find_unused_parameters=True)) <= TOLERANCE


def test_a_penalty_on_gradients_alone_is_an_error_where_it_leaves_parameters_out() -> None:
    for error in run_ranks(penalise_gradients, 2, 1):
        assert re.search(r"2 parameter\(s\) got no gradient on rank \d before SGD.step\(\) at .*: offset, ", error)


def train_on_what_the_model_keeps() -> float:
    """The loss is an attribute of the model; no gradient comes to an output. How far from the mean."""
    model, plain = twins(Offset(), find_unused_parameters=True)
    worst = 0.0
    for step in range(6):
        for each, keeper in ((model, model.module), (plain, plain)):
            each.zero_grad()
            each(data(5, 4, seed=step))
            keeper.kept.backward()
        for ours, own in zip(model.module.inner.parameters(), plain.inner.parameters(), strict=True):
            worst = max(worst, (ours.grad - mean_over_ranks(own.grad)).abs().max().item())
    return worst


def test_a_loss_that_the_model_keeps_is_averaged() -> None:
    assert max(run_ranks(train_on_what_the_model_keeps, 2)) <= TOLERANCE


def step_between_two_backward_passes() -> str:
    model = DistributedDataParallel(Heads().double())
    left, right = model(data(5, 4))
    left.sum().backward()
    del right
    return str(error_of(torch.optim.SGD(model.parameters(), lr=0.1).step))


def test_an_optimizer_may_not_step_before_the_average() -> None:
    for error in run_ranks(step_between_two_backward_passes, 2):
        assert "right.weight, right.bias" in error
        assert "before the optimizer steps" in error


def distil() -> list[str]:
    """From a teacher that was frozen when it had been wrapped, as DINO's is, on batches that do not divide."""
    student, teacher = (DistributedDataParallel(nn.Linear(3, 1)) for _ in range(2))
    teacher.requires_grad_(False)
    with warnings_of_lockstep() as told:
        for (x,) in DataLoader(TensorDataset(torch.ones(23, 3)), batch_size=6):
            (student(x) - teacher(x)).square().mean().backward()
    return told


def test_of_a_frozen_model_nothing_is_expected() -> None:
    assert run_ranks(distil, 2) == [[], []]


# ---- wrapped twice ---------------------------------------------------------------------------------------------


def wrap_twice() -> list[str]:
    once = DistributedDataParallel(mlp())
    inside = nn.Sequential(nn.Linear(4, 4), once)
    torchs = nn.parallel.DistributedDataParallel(mlp())
    errors = [error_of(DistributedDataParallel, module) for module in (once, inside, torchs)]
    assert {type(error) for error in errors} == {ModelError}
    return [str(error) for error in errors]


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrapping_twice_is_an_error_that_names_both(world_size: int) -> None:
    for twice, inside, torchs in run_ranks(wrap_twice, world_size):
        assert "it is a lockstep.DistributedDataParallel already" in twice
        assert "its submodule 1 is a lockstep.DistributedDataParallel already" in inside
        assert "it is a torch.nn.parallel.DistributedDataParallel already" in torchs


def work_inside_of_anothers_forward_pass() -> None:
    """An engine that a module of torch's calls without containing it, such as a frozen teacher."""
    teacher = DistributedDataParallel(mlp())

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.teach = lambda inputs: teacher(inputs)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layer(self.teach(inputs))

    nn.parallel.DistributedDataParallel(Student())(torch.ones(2, 4)).sum().backward()


def test_an_engine_may_run_in_a_pass_of_torchs_that_does_not_contain_it() -> None:
    run_ranks(work_inside_of_anothers_forward_pass, 2)


# ---- one value per channel ------------------------------------------------------------------------------------------


def normalize_one() -> list[str]:
    model = DistributedDataParallel(nn.BatchNorm1d(3))
    errors = [str(error_of(model, torch.ones(1, 3)))]
    with batch.hand.hold(batch.share.BatchShare(1, 2, 2)):
        errors.append(str(error_of(model, torch.ones(1, 3))))
    return errors


def test_batch_normalization_of_one_sample_gets_a_remedy() -> None:
    for rank, errors in enumerate(run_ranks(normalize_one, 2)):
        assert errors[1].startswith(f"rank {rank} had 1 of the 2 sample(s) of this batch")
        for text in errors:
            assert "got input size torch.Size([1, 3])" in text
            assert text.endswith("lockstep.convert_sync_batchnorm(model) before DistributedDataParallel(model)")
