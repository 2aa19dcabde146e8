"""Ranks that train apart: a warning where nobody averages, an error where models differ when the world is left."""

from __future__ import annotations

import copy
import gc
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import lockstep
from ddp_checks import warnings_of_lockstep
from failing import wait_until
from lockstep.drift import comparison, engines, watch
from lockstep.errors import LockstepError, ModelError, RankLost
from lockstep.testing import WorkerDied, limit_s, run_ranks

BATCH = 6
WARNING = "gives each rank its own part of every batch"


def samples() -> torch.utils.data.TensorDataset:
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    after_backward: Callable[[], None] = lambda: None,
    epochs: int = 1,
    **loader: Any,
) -> None:
    batches = lockstep.DataLoader(samples(), BATCH, **loader)
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            after_backward()
            optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def average(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def outcome_of(body: Callable[..., Any], *args: Any, backend: str = "lockstep") -> tuple[list[str], str]:
    """What was warned of while `body` ran in a world, and the error with which the world was left."""
    engines._engines = []  # those of earlier tests, which this worker may hold
    error, kept = "", []
    with warnings_of_lockstep() as told:
        try:
            with lockstep.init(backend):
                kept.append(body(*args))  # as in a script that is one function, or none
        except LockstepError as raised:
            error = f"{type(raised).__name__}: {raised}"
    assert lockstep.current_world() is None
    assert not dist.is_initialized()
    return [text for text in told if WARNING in text], error


# ---- nobody averages --------------------------------------------------------------------------------------


def train_bare(epochs: int) -> None:
    model = make_model()
    train(model, sgd(model), epochs=epochs)


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
@pytest.mark.parametrize(
    ("epochs", "measured"), [(1, "the 3 ranks end with different parameters"), (20, "in the first 64 steps")]
)
def test_an_unwrapped_model_is_warned_of(epochs: int, measured: str, backend: str) -> None:
    """At the end of a short script, and after some steps of a long one."""
    (told, error), *others = run_ranks(outcome_of, 3, train_bare, epochs, backend=backend, init=False)
    (text,) = told
    assert re.match(r"SGD\.step\(\) at .*test_drift\.py:\d+ in train: ", text)
    assert measured in text
    assert "model = lockstep.DistributedDataParallel(model)" in text
    assert error == ""
    assert others == [([], "")] * 2


def train_reporting(make: Callable[[], nn.Module] = make_model) -> None:
    """The model is freed before the world is left."""
    model = make()
    train(model, sgd(model), lambda: average([torch.zeros(1)]), epochs=20)


def make_constant() -> nn.Module:
    model = make_model()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


@pytest.mark.parametrize("make", [make_model, make_constant])
def test_an_unwrapped_model_is_warned_of_if_the_script_communicates(make: Callable[[], nn.Module]) -> None:
    (told, error), *others = run_ranks(outcome_of, 2, train_reporting, make, init=False)
    (text,) = told
    assert "the 2 ranks end with different parameters" in text
    assert error == ""
    assert others == [([], "")]


def train_odd_parameters() -> None:
    """Parameters of other kinds than floats, the last ones empty and sparse."""
    whole, weights = (torch.ones(4, dtype=dtype) for dtype in (torch.complex64, torch.float32))
    parameters = [nn.Parameter(each) for each in (whole, weights.bfloat16(), weights[:0], weights.to_sparse())]
    optimizer = torch.optim.SGD(parameters[:3], lr=0.1)
    optimizer.add_param_group({"params": parameters[3:]})
    for inputs, _ in lockstep.DataLoader(samples(), BATCH):
        optimizer.zero_grad()
        (parameters[0].abs() * inputs.mean(0)).sum().backward()
        optimizer.step()


def test_parameters_of_all_kinds_are_compared() -> None:
    (told, error), _ = run_ranks(outcome_of, 2, train_odd_parameters, init=False)
    assert (told, error) == ([], "")  # of bfloat16, which has no gradient


def by_hand() -> None:
    model = make_model()
    train(model, sgd(model), lambda: average([each.grad for each in model.parameters() if each.grad is not None]))


def with_torch() -> None:
    model = nn.parallel.DistributedDataParallel(make_model())
    train(model, sgd(model))


def with_lockstep() -> nn.Module:
    model = lockstep.DistributedDataParallel(make_model())
    train(model, sgd(model))
    return model


def with_loaders_of_one_rank() -> None:
    model = make_model()
    train(model, sgd(model), rank=0, world_size=1)


def without_a_loader() -> None:
    model = make_model()
    optimizer = sgd(model)
    for _ in range(100):
        model(torch.full((2, 4), dist.get_rank() + 1.0)).sum().backward()
        optimizer.step()


def attacks() -> nn.Module:
    """An inner loop that steps what belongs to one batch, in a program whose model is averaged."""
    model = lockstep.DistributedDataParallel(make_model())
    for inputs, targets in lockstep.DataLoader(samples(), BATCH):
        noise = torch.zeros_like(inputs, requires_grad=True)
        optimizer = torch.optim.SGD([noise], lr=0.1)
        for _ in range(70):
            (-mse_loss(model.module(inputs + noise), targets)).backward(inputs=[noise])
            optimizer.step()
        mse_loss(model(inputs + noise.detach()), targets).backward()
        sgd(model).step()
        model.zero_grad()
    return model


def local_sgd(averages_at_the_end: bool = True) -> None:
    """Parameters are averaged in every 16th of 20 steps."""
    model = make_model()
    steps = iter(range(1, 1000))

    def after() -> None:
        if next(steps) % 16 == 0:
            average([each.data for each in model.parameters()])

    train(model, sgd(model), after, epochs=5)
    if averages_at_the_end:
        average([each.data for each in model.parameters()])


def test_steps_after_the_last_averaging_are_warned_of() -> None:
    (told, error), _ = run_ranks(outcome_of, 2, local_sgd, False, init=False)
    (text,) = told
    assert "average them after the last step, too" in text
    assert error == ""


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
@pytest.mark.parametrize(
    "body", [by_hand, with_torch, with_lockstep, with_loaders_of_one_rank, without_a_loader, local_sgd]
)
def test_no_word_to_those_who_average_or_split_nothing(body: Callable[[], Any], backend: str) -> None:
    assert run_ranks(outcome_of, 2, body, backend=backend, init=False) == [([], "")] * 2


def test_no_word_to_one_rank() -> None:
    assert run_ranks(outcome_of, 1, train_bare, 20, init=False) == [([], "")]


def two_worlds() -> list[int]:
    return [len(outcome_of(body, *args)[0]) for body, *args in ((with_lockstep,), (train_bare, 1), (by_hand,))]


def test_a_second_world_is_another_program() -> None:
    assert run_ranks(two_worlds, 2, init=False) == [[0, 1, 0], [0, 0, 0]]


# ---- models that differ at the end ----------------------------------------------------------------------------


def best_weights() -> nn.Module:
    """Each rank goes back to what its own validation found best."""
    model = lockstep.DistributedDataParallel(make_model())
    kept = copy.deepcopy(model.state_dict())
    train(model, sgd(model))
    if dist.get_rank() == 1:
        model.load_state_dict(kept)
    return model


def step_by_hand(averages: bool = False) -> nn.Module:
    """Natural gradients, as TRPO takes them: no `.grad`, and no optimizer."""
    policy = lockstep.DistributedDataParallel(make_model())
    parameters = list(policy.parameters())
    for inputs in own_batches():
        gradients = torch.autograd.grad(policy(inputs).square().mean(), parameters)
        if averages:
            average(list(gradients))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data.sub_(0.1 * gradient)
    return policy


def step_by_optimizer() -> nn.Module:
    """Gradients past the engine, stepped by torch's optimizer."""
    model = lockstep.DistributedDataParallel(make_model())
    parameters, optimizer = list(model.parameters()), sgd(model)
    for inputs in own_batches():
        gradients = torch.autograd.grad(model(inputs).square().mean(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return model


def reptile() -> nn.Module:
    """Steps towards what an inner loop has made of a copy; no forward pass goes through the engine."""
    model = lockstep.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for inputs in own_batches():
        inner = copy.deepcopy(model.module)
        inner(inputs).square().mean().backward()
        sgd(inner).step()
        for parameter, found in zip(model.parameters(), inner.parameters(), strict=True):
            parameter.grad = parameter.data - found.data
        optimizer.step()
    return model


def evolve() -> nn.Module:
    """Evolution strategies on the inner module, without a gradient."""
    model = lockstep.DistributedDataParallel(make_model())
    draw = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model


def call_inner() -> nn.Module:
    model = lockstep.DistributedDataParallel(make_model())
    train(model.module, sgd(model))
    return model


def under_no_sync() -> nn.Module:
    """The last window is stepped by what each rank has."""
    model = lockstep.DistributedDataParallel(make_model())
    train(model, sgd(model))
    with model.no_sync():
        train(model, sgd(model))
    return model


def own_buffer() -> nn.Module:
    module = make_model()
    module.register_buffer("scale", torch.ones(1))
    model = lockstep.DistributedDataParallel(module)
    train(model, sgd(model))
    module.scale.fill_(dist.get_rank())
    return model


def own_batches() -> list[Tensor]:
    return list(torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(10 + dist.get_rank())))


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
@pytest.mark.parametrize("body", [best_weights, step_by_hand, reptile, evolve, call_inner, under_no_sync, own_buffer])
def test_ranks_that_end_with_different_models_are_an_error(body: Callable[[], nn.Module], backend: str) -> None:
    for _, error in run_ranks(outcome_of, 3, body, backend=backend, init=False):
        num, of = (1, 3) if body is own_buffer else (2, 2)
        assert error.startswith("ModelError: the 3 ranks end with different models: ")
        assert f"{num} of the {of} tensors of Linear, which DistributedDataParallel wraps, differ" in error
        assert ("such as scale" in error) == (body is own_buffer)
        assert ("so call model(x), not model.module(x)" in error) == (body in (call_inner, reptile))


def waiting_for_one_that_left() -> float:
    """Seconds until this rank heard of it."""
    with lockstep.init() as world:
        model = lockstep.DistributedDataParallel(make_model())
        model(torch.ones(2, 4)).sum().backward()
        if world.rank == 0:
            begin_s = time.monotonic()
            with pytest.raises(RankLost, match="left the group while others still needed it"):
                model(torch.ones(2, 4)).sum().backward()
            return time.monotonic() - begin_s
    return 0.0


def test_who_leaves_early_is_named_at_once() -> None:
    """Though it waits to compare its model at its end."""
    waited_s = max(run_ranks(waiting_for_one_that_left, 2, init=False))
    assert waited_s < limit_s(5)


def training_on_alone() -> None:
    """By a process whose group is gone, and whose world nobody has left."""
    lockstep.init()
    model = make_model()
    train(model, sgd(model))
    dist.destroy_process_group()
    assert watch._watched is not None
    watch._watched.group = weakref.ref(nn.Linear(1, 1))  # type: ignore[arg-type]  # which is gone, as the group may be
    alone = {"rank": 0, "world_size": 1}
    with warnings_of_lockstep() as told:
        train(model, sgd(model), epochs=20, **alone)
    assert not told


def test_who_trains_on_when_the_group_is_gone_hears_nothing() -> None:
    run_ranks(training_on_alone, 2, init=False)


def freed(body: Callable[[], nn.Module]) -> None:
    """The model is local to a function, which has returned when the world is left."""
    body()


def freed_at_other_times(body: Callable[[], nn.Module]) -> None:
    """The model is part of a cycle, which the garbage collector comes to at another moment on each rank, or never."""
    model = body()
    model.itself = [model]  # type: ignore[assignment]
    del model
    for step in range(2):
        if step == dist.get_rank():
            gc.collect()
        dist.barrier()


@pytest.mark.parametrize("way", [freed, freed_at_other_times])
@pytest.mark.parametrize("body", [step_by_optimizer, reptile, evolve, call_inner, under_no_sync])
def test_models_that_are_gone_are_compared(body: Callable[[], nn.Module], way: Callable[..., None]) -> None:
    for _, error in run_ranks(outcome_of, 3, way, body, init=False):
        assert "the 3 ranks end with different models: 2 of the 2 tensors of Linear" in error


def trained_on() -> nn.Module:
    """What the engine has trained is trained on, alike, while the engine is garbage: collected soon, late, or never."""
    net = make_model()

    def first() -> None:
        model = lockstep.DistributedDataParallel(net)
        train(model, sgd(model))
        model.itself = [model]  # type: ignore[assignment]

    first()
    for step in range(2):
        if step == dist.get_rank():
            gc.collect()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.5)
    return net


def two_worlds_with_garbage() -> str:
    """A model of the first world is collected in the second, whose engines have the same numbers."""
    engines._engines = []
    gc.disable()
    with lockstep.init():
        model = with_lockstep()
        model.itself = [model]
    del model
    with lockstep.init() as world:
        model = with_lockstep()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1
        del model
        if world.rank == 1:
            gc.collect()
    gc.enable()
    return "no error"


def test_garbage_of_an_earlier_world_is_none_of_this_one() -> None:
    assert run_ranks(two_worlds_with_garbage, 2, init=False) == ["no error"] * 2


def test_an_engine_that_outlives_the_package_is_silent() -> None:
    keep = "torch._C.kept = lockstep.DistributedDataParallel(torch.nn.Linear(1, 1))"
    script = f"import lockstep, torch; world = lockstep.init(device='cpu'); {keep}; raise SystemExit(3)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=limit_s(60))
    assert (done.returncode, done.stderr) == (3, "")


class WithParts(nn.Module):
    """What ranks have alike, and what each has of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = make_model()
        self.expert, self.ignored = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.expert.allreduce = False  # type: ignore[attr-defined]
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.norm = nn.BatchNorm1d(4)
        self._ddp_params_and_buffers_to_ignore = ["ignored", "table"]
        self.register_buffer("table", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.norm(inputs)) + self.expert.sum() + self.ignored.sum()


def parts_of_ranks() -> nn.Module:
    module = WithParts()
    model = lockstep.DistributedDataParallel(module)
    train(model, sgd(model))
    with torch.no_grad():
        model(own_batches()[0])  # running statistics of a rank's own
        for each in (module.expert, module.ignored, module.cache, module.table):
            each.fill_(dist.get_rank())
    return model


def own_buffers_on_purpose() -> nn.Module:
    module = make_model()
    module.register_buffer("scale", torch.ones(1))
    model = lockstep.DistributedDataParallel(module, broadcast_buffers=False)
    module.scale.fill_(dist.get_rank())
    return model


def models_of_each_rank() -> nn.Module:
    """Engines of one rank each."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = lockstep.DistributedDataParallel(make_model(), process_group=groups[dist.get_rank()])
    train(model, sgd(model), rank=dist.get_rank(), world_size=dist.get_world_size())
    return model


def rounded() -> nn.Module:
    """As by ranks on processors of two kinds."""
    model = lockstep.DistributedDataParallel(make_model())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 2e-7 * dist.get_rank())
    return model


def a_copy_on_one_rank() -> list[nn.Module]:
    model = with_lockstep()
    copies = [copy.deepcopy(model) for _ in range(dist.get_rank())]
    for each in copies:
        nn.init.zeros_(each.module.weight)
    return [model, *copies]


def one_that_is_gone() -> nn.Module | None:
    """One rank has no engine any more."""
    model: nn.Module | None = best_weights()
    if dist.get_rank() == 1:
        model = None
    return model


@pytest.mark.parametrize(
    "body",
    [
        *(parts_of_ranks, own_buffers_on_purpose, models_of_each_rank, rounded, a_copy_on_one_rank, one_that_is_gone),
        *(attacks, with_lockstep, trained_on),
    ],
)
def test_what_differs_on_purpose_is_no_error(body: Callable[[], Any]) -> None:
    assert run_ranks(outcome_of, 2, body, init=False) == [([], "")] * 2


def test_what_is_averaged_by_hand_is_no_error() -> None:
    assert run_ranks(outcome_of, 2, step_by_hand, True, init=False) == [([], "")] * 2


# ---- endings ---------------------------------------------------------------------------------------------


def fail_after_training() -> None:
    with lockstep.init():
        model = best_weights()
        raise ValueError(f"after training {type(model).__name__}")


def test_an_error_of_the_script_stays_the_error() -> None:
    for error in run_ranks(fail_after_training, 2, init=False, expect_errors=True):
        assert isinstance(error, ValueError)


def leave_at_other_times() -> str:
    """One rank ends without leaving its world; the other does not wait for it for ever."""
    engines._engines = []
    comparison._PATIENCE_S = 0.2
    world = lockstep.init()
    model = best_weights()
    if dist.get_rank() == 0:
        try:
            world.shutdown()
        except ModelError as error:
            return str(error)
    else:
        world._leave()
    return "" if model is not None else "gone"


def test_a_rank_that_does_not_come_is_not_waited_for() -> None:
    assert run_ranks(leave_at_other_times, 2, init=False) == ["", ""]


def leave_without_one_that_is_killed(trained: Path) -> str:
    """The other has nothing to tell any more, and its process is gone."""
    comparison._PATIENCE_S = 3600.0
    world = lockstep.init()
    model = best_weights()
    if dist.get_rank() == 1:
        wait_until(trained.exists, "the other rank's end")
        os.kill(os.getpid(), signal.SIGKILL)
    trained.touch()
    world.shutdown()
    return type(model).__name__


def test_a_rank_that_is_killed_is_not_waited_for(tmp_path: Path) -> None:
    outcomes = run_ranks(leave_without_one_that_is_killed, 2, tmp_path / "trained", init=False, expect_errors=True)
    assert outcomes == ["DistributedDataParallel", WorkerDied(1, signal.SIGKILL, 137)]


def test_shutdown_raises_and_leaves_the_world() -> None:
    for _, error in run_ranks(outcome_of, 2, best_weights, init=False):
        assert error


def time_of_a_hook() -> int:
    """Other optimizers' steps are counted until something is communicated, and never again."""
    watch._watched, watch._is_quiet = None, False
    model = make_model()
    train(model, sgd(model), lambda: dist.barrier())
    assert not watch._is_quiet
    return watch._watched.num_steps if watch._watched is not None else -1


def test_a_program_that_communicates_is_soon_left_alone() -> None:
    assert run_ranks(time_of_a_hook, 2) == [1, 1]
