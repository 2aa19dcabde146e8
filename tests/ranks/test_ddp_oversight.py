"""Mistakes with `DistributedDataParallel` that would end in a training that only seems to be right."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler, IterableDataset, Subset, TensorDataset

import lockstep
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
from lockstep import DataLoader, DistributedDataParallel, batch, global_loss
from lockstep.errors import InputError, ModelError
from lockstep.parallel import loss_kinds
from lockstep.parallel.by_hand import AccumulatedGradients
from lockstep.parallel.forward_errors import explain_forward_error
from lockstep.testing import run_ranks

# ---- the inner module is called ------------------------------------------------------------------------------


def call_inner() -> str:
    net = mlp().double()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(data(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    net(data(2, 4)).sum().backward()
    error = error_of(optimizer.step)
    return f"{type(error).__name__}: {error}"


@backends
@pytest.mark.parametrize("world_size", [2, 3])
def test_calling_the_inner_module_is_an_error(backend: str, world_size: int) -> None:
    for error in run_ranks(call_inner, world_size, backend=backend):
        assert error.startswith("ModelError: SGD.step() at ")
        assert "ddp_checks.py" in error  # which calls it here
        assert "Call model(x)" in error


def call_inner_in_a_closure() -> str:
    net = mlp().double()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        loss = net(data(2, 4)).sum()
        loss.backward()
        return loss

    return str(error_of(optimizer.step, closure))


def test_calling_the_inner_module_in_a_closure_is_an_error() -> None:
    assert all("Call model(x)" in error for error in run_ranks(call_inner_in_a_closure, 2))


def step_by_autograd_grad(equal: bool) -> str:
    """Gradients that `torch.autograd.grad` has returned are put into `.grad`, with and without an average by hand."""
    model = DistributedDataParallel(mlp().double())
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    try:
        for _ in range(5):
            gradients = torch.autograd.grad(model(data(2, 4)).mean(), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if equal:
                    dist.all_reduce(gradient)
                parameter.grad = gradient
            optimizer.step()
    except ModelError as error:
        return str(error)
    assert_same_on_all_ranks(*parameters)
    return ""


def test_steps_by_what_autograd_grad_returns_are_an_error_unless_somebody_averages_it() -> None:
    """No sentinel fires; each rank trained a model of its own without a word."""
    assert all(
        "torch.autograd.grad returns is this rank's alone" in error
        for error in run_ranks(step_by_autograd_grad, 2, False)
    )
    assert run_ranks(step_by_autograd_grad, 2, True) == ["", ""]


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
        assert error.startswith("a gradient with a graph of its own (create_graph=True")


def train_in_evaluation_mode(kind: str) -> str:
    model = DistributedDataParallel(nn.Linear(4, 1).double()).eval()
    for inputs in DataLoader(TensorDataset(torch.ones(27, 4, dtype=torch.float64)), 8):
        some = inputs[0][:3] if kind == "slice" else torch.ones(5, 4, dtype=torch.float64)
        output = model(some)  # no error yet
        return str(error_of(output.mean().backward))
    return "no batch"


@pytest.mark.parametrize(("kind", "words"), [("slice", "takes 3 of the 4 samples"), ("other", "cannot tell how many")])
def test_gradients_of_parameters_in_evaluation_mode_are_not(kind: str, words: str) -> None:
    assert all(words in error for error in run_ranks(train_in_evaluation_mode, 2, kind))


def step_behind_no_sync(averages: bool, between: Callable[[DistributedDataParallel], None] | None = None) -> list[str]:
    """The last window of an epoch is cut short, and the script steps by what there is, or by what it makes of it."""
    model = DistributedDataParallel(mlp().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings_of_lockstep() as told:
        for _ in range(2):
            with model.no_sync():
                model(data(2, 4)).mean().backward()
            if averages:
                model(data(2, 4)).mean().backward()
            if between is not None:
                between(model)
            optimizer.step()
            optimizer.zero_grad()
    if between in (average_each, average_flat):
        assert_same_on_all_ranks(*model.parameters())
    return told


def average_each(model: DistributedDataParallel) -> None:
    """As GSAM does."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)


def average_flat(model: DistributedDataParallel) -> None:
    """In other tensors, and clipped behind it."""
    parameters = list(model.parameters())
    flat = nn.utils.parameters_to_vector(parameter.grad for parameter in parameters)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, part in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = part.view_as(parameter).clone()
    nn.utils.clip_grad_norm_(parameters, 1e-3)


def show_and_clip(model: DistributedDataParallel) -> None:
    """Neither averages gradients."""
    dist.all_reduce(torch.ones(()))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def add_noise(model: DistributedDataParallel) -> None:
    for parameter in model.parameters():
        parameter.grad += torch.rand_like(parameter)


def test_steps_by_what_no_sync_has_accumulated_are_warned_of() -> None:
    zero, one = run_ranks(step_behind_no_sync, 2, False)
    assert len(zero) == 1
    assert zero[0].startswith("SGD.step() at ")
    assert "were accumulated under no_sync() (or disable_allreduce()) and no pass has averaged them" in zero[0]
    assert one == []
    assert run_ranks(step_behind_no_sync, 2, True) == [[], []]
    assert run_ranks(step_behind_no_sync, 1, False) == [[]]


@backends
@pytest.mark.parametrize("between", [average_each, average_flat, show_and_clip, add_noise])
def test_those_that_the_script_averages_itself_are_not(between: Callable[..., None], backend: str) -> None:
    told = run_ranks(step_behind_no_sync, 2, False, between, backend=backend)
    assert [len(each) for each in told] == [between in (show_and_clip, add_noise), 0]


def count_comparisons() -> int:
    """How often a script that averages every time is asked whether it did: each time waits for a GPU."""
    model = DistributedDataParallel(mlp().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    looks: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        were_averaged = AccumulatedGradients.were_averaged

        def look(own: AccumulatedGradients) -> bool:
            looks.append(own)
            return were_averaged(own)

        patch.setattr(AccumulatedGradients, "were_averaged", look)
        for _ in range(6):
            with model.no_sync():
                model(data(2, 4)).mean().backward()
            average_each(model)
            optimizer.step()
            optimizer.zero_grad()
    return len(looks)


def test_a_script_that_always_averages_is_asked_a_few_times() -> None:
    assert run_ranks(count_comparisons, 2) == [3, 3]


def test_they_are_looked_at_once_in_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with each bucket."""
    looks: list[object] = []
    monkeypatch.setattr(AccumulatedGradients, "note", lambda self: looks.append(self))
    with lockstep.init(device="cpu"):
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))), bucket_cap_mb=0)
        with model.no_sync():
            for _ in range(3):
                model(torch.rand(2, 4)).sum().backward()
    assert len(looks) == 3


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
        assert error.startswith("a gradient with a graph of its own (create_graph=True")
        assert "drop_last=True" in error


class AllGatherGrad(torch.autograd.Function):
    """As nnU-Net and others have it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient[dist.get_rank()]


def gather_by(how: str, num_samples: int) -> list[str]:
    model = DistributedDataParallel(mlp().double())
    with warnings_of_lockstep() as told:
        for (inputs,) in DataLoader(TensorDataset(torch.arange(num_samples * 4.0).double().view(-1, 4)), 4):
            output = model(inputs)
            if how == "lockstep":
                total = lockstep.all_gather(output).sum(0)
            elif how == "AllGatherGrad":
                total = AllGatherGrad.apply(output.sum(0)).sum(0)
            else:
                total = all_reduce(output.sum(0))
            total.square().mean().backward()
    return [text for text in told if "collective of torch's" in text]


@pytest.mark.parametrize("how", ["AllGatherGrad", "all_reduce", "lockstep"])
def test_a_loss_over_torchs_collectives_is_warned_of_on_a_batch_that_the_ranks_do_not_divide(how: str) -> None:
    zero, one = run_ranks(gather_by, 2, how, 7)
    assert len(zero) == (how != "lockstep")
    assert all("Gather with lockstep.all_gather" in text for text in zero)
    assert one == []
    assert run_ranks(gather_by, 2, how, 8) == [[], []]


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


def regularise() -> list[int]:
    """A regulariser's backward pass of its own: what the steps cost, and the same parameters afterwards."""
    model = DistributedDataParallel(mlp().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    costs = []
    for _ in range(5):
        optimizer.zero_grad()
        sum(parameter.square().sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
        before = num_collectives()
        optimizer.step()
        costs.append(num_collectives() - before)
    assert_same_on_all_ranks(*model.parameters())
    return costs


def test_equal_gradients_are_fine_and_soon_not_compared_any_more() -> None:
    assert run_ranks(regularise, 2) == [[1, 1, 1, 0, 0]] * 2


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
    """Nobody uses the graph: training goes on as without one."""
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
        assert ("steps within the backward pass, by this rank's own gradients" in error) == (world_size > 1)
        assert changed == (world_size == 1)


def second_pass_through_gradients() -> str:
    """A gradient penalty with a backward pass of its own, which the engine cannot see."""
    model = DistributedDataParallel(mlp().double())
    inputs = data(2, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    model(data(2, 4)).sum().backward()
    gradient.square().sum().backward()
    return str(error_of(torch.optim.SGD(model.parameters(), lr=0.1).step))


def test_gradients_behind_the_average_are_an_error() -> None:
    assert all("create_graph=True" in error for error in run_ranks(second_pass_through_gradients, 2))


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


# ---- a loss goes past the outputs -------------------------------------------------------------------------


class Keeping(nn.Module):
    """Keeps a loss of its hidden units, as layers with experts do, or returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.kept = torch.zeros(())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        self.kept = hidden.square().mean()
        return self.head(hidden), self.kept


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


def keep_a_loss(batch_size: int, by_outputs: bool) -> list[str]:
    model = DistributedDataParallel(Keeping())
    with warnings_of_lockstep() as told:
        for (x,) in DataLoader(TensorDataset(torch.ones(24, 3)), batch_size=batch_size):
            output, returned = model(x)
            (output.mean() + (returned if by_outputs else model.module.kept)).backward()
    return told


@pytest.mark.parametrize(("batch_size", "by_outputs"), [(5, False), (5, True), (6, False)])
def test_losses_past_the_outputs_of_batches_that_ranks_do_not_divide(batch_size: int, by_outputs: bool) -> None:
    """Here the 24 samples leave one batch of 4, which 2 ranks divide, and some of 5, which they do not."""
    zero, one = run_ranks(keep_a_loss, 2, batch_size, by_outputs)
    assert one == []
    if batch_size == 6 or by_outputs:
        assert zero == []
    else:
        (text,) = zero
        assert text.startswith("test_ddp_oversight.py:")
        assert "computed within forward() and not returned" in text


# ---- wrapped twice ---------------------------------------------------------------------------------------------


def wrap_twice() -> list[str]:
    once = DistributedDataParallel(mlp())
    inside = nn.Sequential(nn.Linear(4, 4), once)
    torchs = nn.parallel.DistributedDataParallel(mlp())
    errors = [error_of(DistributedDataParallel, module) for module in (once, inside, torchs)]
    errors += [error_of(nn.parallel.DistributedDataParallel, module) for module in (once, inside)]
    assert {type(error) for error in errors} == {ModelError}
    return [str(error) for error in errors]


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrapping_twice_is_an_error_that_names_both(world_size: int) -> None:
    for twice, inside, torchs, *around in run_ranks(wrap_twice, world_size):
        assert "it is a lockstep.DistributedDataParallel already" in twice
        assert "its submodule 1 is a lockstep.DistributedDataParallel already" in inside
        assert "it is a torch.nn.parallel.DistributedDataParallel already" in torchs
        for error in around:
            assert "parallel.DistributedDataParallel was given a module that is or contains a lockstep" in error


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


# ---- batches that nobody splits -----------------------------------------------------------------------------------


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(8, 1, 4))


def dataset() -> TensorDataset:
    return TensorDataset(torch.ones(12, 4))


FEEDS: dict[str, Callable[[], object]] = {
    "plain": lambda: torch.utils.data.DataLoader(dataset(), 4),
    "shuffled": lambda: torch.utils.data.DataLoader(dataset(), 4, shuffle=True),
    "one by one": lambda: torch.utils.data.DataLoader(dataset(), None),
    "sampler": lambda: torch.utils.data.DataLoader(dataset(), 4, sampler=DistributedSampler(dataset())),
    "stream": lambda: torch.utils.data.DataLoader(Stream(), None),
    "subset": lambda: torch.utils.data.DataLoader(Subset(dataset(), range(12)), 4),
    "lockstep": lambda: DataLoader(dataset(), 4),
}


def feed(kind: str) -> list[str]:
    model = DistributedDataParallel(nn.Linear(4, 1))
    with warnings_of_lockstep() as told:
        for found in FEEDS[kind]():  # type: ignore[attr-defined]
            inputs = found[0] if isinstance(found, list | tuple) else found
            model(inputs).sum().backward()
    return [text for text in told if "trains on all" in text]


@pytest.mark.parametrize("kind", ["plain", "shuffled", "one by one"])
def test_a_loader_that_gives_every_rank_everything_is_said_once(kind: str) -> None:
    (warning,), *others = run_ranks(feed, 2, kind)
    assert "each of the 2 ranks trains on all 12 samples of its TensorDataset" in warning
    assert "lockstep.DataLoader(dataset, batch_size=GLOBAL)" in warning
    assert "DistributedSampler" in warning
    assert others == [[]]


@pytest.mark.parametrize("kind", ["sampler", "stream", "subset", "lockstep"])
def test_no_word_of_loaders_that_may_split(kind: str) -> None:
    assert run_ranks(feed, 2, kind) == [[], []]


def test_no_word_to_one_rank() -> None:
    assert run_ranks(feed, 1, "plain") == [[]]


def validate_beside() -> list[str]:
    validation = iter(FEEDS["plain"]())  # type: ignore[call-overload]
    return [*feed("sampler"), str(next(validation))[:0]]


def test_no_word_of_a_plain_loader_beside_one_that_splits() -> None:
    assert run_ranks(validate_beside, 2) == [[""], [""]]


def time_of_a_look() -> tuple[float, int]:
    from lockstep.parallel import undivided

    group = dist.group.WORLD
    assert group is not None
    start = time.process_time()
    undivided.warn_of_undivided_data(group)
    return time.process_time() - start, len(gc.get_objects())


def test_a_look_is_cheap() -> None:
    taken_s, num_objects = run_ranks(time_of_a_look, 2)[0]
    assert taken_s < 0.2, f"{taken_s} s of CPU time for {num_objects} objects"


# ---- one value per channel ------------------------------------------------------------------------------------------


def normalize_one() -> tuple[str, str]:
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        nn.BatchNorm1d(3)(torch.ones(1, 3))
    explained = explain_forward_error(caught.value, dist.get_world_size(), None)
    model = DistributedDataParallel(nn.BatchNorm1d(3))
    with batch.hold(batch.BatchShare(1, 2, 2)), pytest.raises(InputError) as raised:
        model(torch.ones(1, 3))
    return str(explained), str(raised.value)


def test_batch_normalization_of_one_sample_gets_a_remedy() -> None:
    for rank, (without, with_share) in enumerate(run_ranks(normalize_one, 2)):
        assert without.startswith(f"rank {rank} had 1 sample(s) in this batch")
        assert with_share.startswith(f"rank {rank} had 1 of the 2 sample(s) of this batch")
        for text in (without, with_share):
            assert "got input size torch.Size([1, 3])" in text
            assert "lockstep.convert_sync_batchnorm(model)" in text
            assert "drop_last=True" in text


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        nn.BatchNorm1d(3)(torch.ones(1, 3))
    assert explain_forward_error(caught.value, 1, None) is None
    assert isinstance(explain_forward_error(caught.value, 2, None), InputError)
    assert explain_forward_error(ValueError("something else"), 2, None) is None
    assert explain_forward_error(RuntimeError(str(caught.value)), 2, None) is None


def what_is_said_of_a_sum(is_said: bool) -> list[str]:
    loss_kinds._found.clear()
    model = DistributedDataParallel(mlp())
    with warnings_of_lockstep() as told:
        for (x,) in DataLoader(TensorDataset(torch.ones(12, 4)), 6):
            loss = cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long), reduction="sum")
            (global_loss(loss) if is_said else loss).backward()
    return told


def test_a_sum_that_the_script_divides_behind_backward_is_told_what_to_write() -> None:
    """Gradients that a script multiplies by `world_size / count`, as fairseq does, are right already."""
    (text,), others = run_ranks(what_is_said_of_a_sum, 2, False)
    assert (
        "lockstep.global_loss(loss) for what every rank has computed over the data of all, and where the script" in text
    )
    assert "divides gradients behind backward() by a count of all ranks" in text
    assert others == []
    assert run_ranks(what_is_said_of_a_sum, 2, True) == [[], []]
