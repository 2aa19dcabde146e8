"""Ranks that train apart because nobody averages: a warning while they do, an error when the world is left."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import lockstep
from ddp_checks import warnings_of_lockstep
from lockstep import env
from lockstep.drift import comparison, engines, watch
from lockstep.errors import LockstepError, ModelError
from lockstep.testing import run_ranks

BATCH = 6
WARNING = "nobody averages"


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
    after_step: Callable[[], None] = lambda: None,
    **loader: Any,
) -> None:
    for inputs, targets in lockstep.DataLoader(samples(), BATCH, **loader):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        after_backward()
        optimizer.step()
        after_step()


def average(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
        tensor /= dist.get_world_size()


# ---- nobody averages --------------------------------------------------------------------------------------


def outcome_of(body: Callable[[], None], backend: str = "lockstep") -> tuple[list[str], str]:
    """What was warned of drift while `body` ran in a world, and the error with which the world was left."""
    engines._engines = []  # those of earlier tests, which this worker may hold
    error = ""
    with warnings_of_lockstep() as told:
        try:
            with lockstep.init(backend):
                body()
        except LockstepError as raised:
            error = f"{type(raised).__name__}: {raised}"
    assert lockstep.current_world() is None
    assert not dist.is_initialized()
    return [text for text in told if WARNING in text], error


def train_bare() -> None:
    model = make_model()
    train(model, torch.optim.SGD(model.named_parameters(), lr=0.1))


def bare(backend: str) -> tuple[list[str], str]:
    return outcome_of(train_bare, backend)


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_unwrapped_model_is_a_warning_and_an_error(world_size: int, backend: str) -> None:
    (told, *others) = run_ranks(bare, world_size, backend, init=False)
    (warning,), _ = told
    assert "SGD.step() at " in warning
    assert "test_drift.py" in warning
    assert "2 parameter(s) that it steps (weight, bias)" in warning
    assert "model = lockstep.DistributedDataParallel(model)" in warning
    assert all(not warnings for warnings, _ in others), "only rank 0 warns"
    for _, error in [told, *others]:
        assert error.startswith("ModelError: ")
        assert f"the {world_size} ranks have trained different models" in error
        assert "model = lockstep.DistributedDataParallel(model)" in error


def bare_with_metrics() -> tuple[list[str], str]:
    def body() -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            train(model, optimizer)
            dist.all_reduce(torch.ones(1))

    return outcome_of(body)


def test_collectives_of_something_else_do_not_excuse_it() -> None:
    assert all(error.startswith("ModelError") for _, error in run_ranks(bare_with_metrics, 2, init=False))


def with_torchs_sampler(
    model: nn.Module,
    after_backward: Callable[[], None] = lambda: None,
    after_step: Callable[[], None] = lambda: None,
    epochs: int = 1,
    **sampler: Any,
) -> None:
    """A loop of torch's tutorials."""
    split = torch.utils.data.DistributedSampler(samples(), **sampler)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    for epoch in range(epochs):
        split.set_epoch(epoch)
        for inputs, targets in torch.utils.data.DataLoader(samples(), batch_size=3, sampler=split):
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            after_backward()
            optimizer.step()
            after_step()


def bare_with_torchs_sampler() -> tuple[list[str], str]:
    return outcome_of(lambda: with_torchs_sampler(make_model()))


def bare_with_a_loss_to_show() -> tuple[list[str], str]:
    """The loss of each step is reduced, as engines that know no lockstep group do."""
    return outcome_of(lambda: with_torchs_sampler(make_model(), after_step=lambda: dist.all_reduce(torch.ones(1))))


def bare_with_batchnorm_over_all_ranks() -> tuple[list[str], str]:
    """Whose backward pass communicates, before the gradient of the first layer is there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2, bias=False), lockstep.SyncBatchNorm(2), nn.Linear(2, 1))
    return outcome_of(lambda: with_torchs_sampler(model))


@pytest.mark.parametrize("body", [bare_with_torchs_sampler, bare_with_a_loss_to_show])
def test_an_unwrapped_model_beside_torchs_sampler(body: Callable[[], Any]) -> None:
    first, second = run_ranks(body, 2, init=False)
    (warning,) = first[0]
    assert "while torch's DistributedSampler gives each rank its own part of the data" in warning
    assert "2 parameter(s) that it steps (weight, bias)" in warning
    assert second[0] == []
    for _, error in (first, second):
        assert error.startswith("ModelError: the 2 ranks have trained different models")
    assert error.endswith("give each sampler num_replicas=1 and rank=0")


class InTurns(torch.utils.data.Sampler[int]):
    """Splits data by rank and knows no `num_replicas`, as mmengine's DefaultSampler."""

    def __init__(self, world_size: int | None = None) -> None:
        self.rank, self.world_size = dist.get_rank(), world_size or dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank % self.world_size, len(samples()), self.world_size))

    def __len__(self) -> int:
        return len(samples()) // self.world_size


def train_in_turns(world_size: int | None = None) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    for inputs, targets in torch.utils.data.DataLoader(samples(), batch_size=2, sampler=InTurns(world_size)):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()


def bare_in_turns() -> tuple[list[str], str]:
    return outcome_of(train_in_turns)


def test_an_unwrapped_model_beside_a_sampler_of_another_library() -> None:
    (told, error), (others, _) = run_ranks(bare_in_turns, 2, init=False)
    assert ["while InTurns gives each rank its own part of the data" in text for text in told] == [True]
    assert others == []
    assert error.startswith("ModelError: the 2 ranks have trained different models")
    assert error.endswith("give each rank a sampler of all its data")


def test_what_batchnorm_communicates_does_not_excuse_it() -> None:
    first, second = run_ranks(bare_with_batchnorm_over_all_ranks, 2, init=False)
    assert len(first[0]) == 1
    assert all(error.startswith("ModelError: ") for _, error in (first, second))


def without_a_world(store: str) -> list[str]:
    """The group of a script that knows torch.distributed alone."""
    with warnings_of_lockstep() as told:
        rank, world_size = env.RANK.get(), env.WORLD_SIZE.get()
        dist.init_process_group("lockstep", init_method=f"file://{store}", rank=rank, world_size=world_size)
        with_torchs_sampler(make_model())
        dist.destroy_process_group()
    return [text for text in told if WARNING in text]


def test_a_script_of_torch_hears_of_it_too(tmp_path: Path) -> None:
    first, second = run_ranks(without_a_world, 2, str(tmp_path / "store"), init=False)
    assert len(first) == 1
    assert second == []


def bare_behind_an_engine_that_is_gone() -> tuple[list[str], str]:
    def body() -> None:
        gone = lockstep.DistributedDataParallel(make_model())
        gone.itself = gone  # type: ignore[assignment]  # only the garbage collector finds it
        del gone
        train_bare()

    gc.disable()
    try:
        return outcome_of(body)
    finally:
        gc.enable()


def test_an_engine_that_is_gone_excuses_nothing() -> None:
    first, second = run_ranks(bare_behind_an_engine_that_is_gone, 2, init=False)
    (warning,) = first[0]
    assert "2 parameter(s) that it steps (weight, bias)" in warning
    assert all(error.startswith("ModelError") for _, error in (first, second))


def fail_after_training() -> None:
    with lockstep.init():
        train_bare()
        raise ValueError("of the script")


def test_an_error_of_the_script_stays_the_error() -> None:
    errors = run_ranks(fail_after_training, 2, init=False, expect_errors=True)
    assert [type(error) for error in errors] == [ValueError] * 2


def fail_after_training_and_shut_down() -> None:
    world = lockstep.init()
    try:
        train_bare()
        raise ValueError("of the script")
    finally:
        world.shutdown()


def test_shutdown_behind_an_error_says_nothing() -> None:
    errors = run_ranks(fail_after_training_and_shut_down, 2, init=False, expect_errors=True)
    assert [type(error) for error in errors] == [ValueError] * 2


def shut_down_by_hand() -> str:
    world = lockstep.init()
    train_bare()
    with pytest.raises(ModelError):
        world.shutdown()
    return "is closed" if lockstep.current_world() is None and not dist.is_initialized() else "is open"


def test_shutdown_raises_and_leaves_the_world() -> None:
    assert run_ranks(shut_down_by_hand, 2, init=False) == ["is closed"] * 2


# ---- somebody averages, or nobody needs to ------------------------------------------------------------------


def with_lockstep() -> None:
    model = lockstep.DistributedDataParallel(make_model())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def without_averaging_on_purpose() -> None:
    model = lockstep.DistributedDataParallel(make_model())
    with model.no_sync():
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def with_torch() -> None:
    model = nn.parallel.DistributedDataParallel(make_model())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def by_hand() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, lambda: average([each.grad for each in model.parameters() if each.grad is not None]))


def by_hand_on_a_group_of_gloo() -> None:
    group = dist.new_group(backend="gloo")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, lambda: average([each.grad for each in model.parameters() if each.grad is not None], group))


def with_fsdp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(make_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def with_horovod() -> None:
    from lockstep.compat.horovod import torch as hvd

    hvd.init()
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters()))
    hvd.shutdown()


class AveragingSGD(torch.optim.SGD):
    """Calls its parent's step, which calls the hooks a second time."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        average([each.grad for group in self.param_groups for each in group["params"]])
        super().step(closure)


def with_an_optimizer_that_averages() -> None:
    model = make_model()
    torch.optim.SGD(model.parameters())  # From now on the parent's step calls the hooks.
    train(model, AveragingSGD(model.parameters(), lr=0.1))


def with_apex() -> None:
    from lockstep.compat.apex.parallel import DistributedDataParallel

    model = DistributedDataParallel(make_model())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def make_normalized() -> nn.Module:
    """At O2 some of its parameters have masters, and those of the normalization have none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


class Scale(nn.Module):
    """A criterion's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs * self.weight


def train_with_masters(criterion: nn.Module) -> None:
    """At Apex's O2; `criterion` is no part of what the engine wraps."""
    from lockstep.compat.apex import amp
    from lockstep.compat.apex.parallel import DistributedDataParallel

    net = make_normalized()
    optimizer: Any = torch.optim.SGD([*net.parameters(), *criterion.parameters()], lr=0.1)
    (net, criterion), optimizer = amp.initialize(
        [net, criterion], optimizer, opt_level="O2", loss_scale=1.0, verbosity=0
    )
    model = DistributedDataParallel(net)
    split = torch.utils.data.DistributedSampler(samples())
    for inputs, targets in torch.utils.data.DataLoader(samples(), batch_size=3, sampler=split):
        optimizer.zero_grad()
        with amp.scale_loss(mse_loss(criterion(model(inputs)).float(), targets), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    amp._amp_state.__init__()  # type: ignore[misc]  # as in a new process, for later tests


def with_apex_masters() -> None:
    train_with_masters(nn.Identity())


def with_fp16_optimizer() -> None:
    from lockstep.compat.apex.fp16_utils import FP16_Optimizer, network_to_half
    from lockstep.compat.apex.parallel import DistributedDataParallel

    model = DistributedDataParallel(network_to_half(make_normalized()))
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs, targets in lockstep.DataLoader(samples(), BATCH):
        optimizer.zero_grad()
        optimizer.backward(mse_loss(model(inputs).float(), targets))
        optimizer.step()


def with_loaders_of_one_rank() -> None:
    model = make_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1 + dist.get_rank()), rank=0, world_size=1)


def without_a_loader() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4) + dist.get_rank()).sum().backward()
        optimizer.step()


def with_torch_and_its_sampler() -> None:
    with_torchs_sampler(nn.parallel.DistributedDataParallel(make_model()))


def by_hand_with_torchs_sampler() -> None:
    model = make_model()
    with_torchs_sampler(model, lambda: average([each.grad for each in model.parameters() if each.grad is not None]))


def averaged(gradient: Tensor) -> Tensor:
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def by_hooks() -> None:
    """The gradient that is there last has been averaged when it is there."""
    model = make_model()
    for parameter in model.parameters():
        parameter.register_hook(averaged)
    with_torchs_sampler(model)


def by_hooks_of_one_parameter() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    model.weight.register_hook(averaged)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def by_hooks_on_accumulated_gradients() -> None:
    model = make_model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda own: average([own.grad]))  # type: ignore[list-item]
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def parameters_by_hand() -> None:
    """After each step, and not gradients before it."""
    model = make_model()
    with_torchs_sampler(model, after_step=lambda: average([each.data for each in model.parameters()]))


def with_a_sampler_of_one_rank() -> None:
    with_torchs_sampler(make_model(), num_replicas=1, rank=0)
    train_in_turns(world_size=1)


INNOCENT = [
    (with_torch_and_its_sampler, "lockstep"),
    (by_hand_with_torchs_sampler, "lockstep"),
    (by_hooks, "lockstep"),
    (by_hooks_of_one_parameter, "lockstep"),
    (by_hooks_on_accumulated_gradients, "lockstep"),
    (parameters_by_hand, "lockstep"),
    (with_a_sampler_of_one_rank, "lockstep"),
    (with_lockstep, "lockstep"),
    (with_lockstep, "gloo"),
    (without_averaging_on_purpose, "lockstep"),
    (with_torch, "lockstep"),
    (with_torch, "gloo"),
    (by_hand, "lockstep"),
    (by_hand, "gloo"),
    (by_hand_on_a_group_of_gloo, "lockstep"),
    (with_fsdp, "lockstep"),
    (with_fsdp, "gloo"),
    (with_horovod, "lockstep"),
    (with_horovod, "gloo"),
    (with_an_optimizer_that_averages, "lockstep"),
    (with_apex, "lockstep"),
    (with_apex, "gloo"),
    (with_apex_masters, "lockstep"),
    (with_fp16_optimizer, "lockstep"),
    (with_fp16_optimizer, "gloo"),
    (with_loaders_of_one_rank, "lockstep"),
    (without_a_loader, "lockstep"),
]


@pytest.mark.parametrize(
    ("body", "backend"), INNOCENT, ids=[f"{body.__name__}-{backend}" for body, backend in INNOCENT]
)
def test_no_word_to_those_who_average_or_split_nothing(body: Callable[[], None], backend: str) -> None:
    assert run_ranks(outcome_of, 2, body, backend, init=False) == [([], "")] * 2


def test_no_word_to_one_rank() -> None:
    assert run_ranks(bare, 1, "lockstep", init=False) == [([], "")]


def local_sgd() -> str:
    """Four steps, averaged after the second only."""
    steps = 0

    def body() -> None:
        model = make_model()

        def after_step() -> None:
            nonlocal steps
            steps += 1
            if steps == 2:
                average([each.data for each in model.parameters()])

        train(model, torch.optim.SGD(model.parameters(), lr=0.1), after_step=after_step)

    return outcome_of(body)[1]


def test_parameters_averaged_now_and_then_are_no_error() -> None:
    assert run_ranks(local_sgd, 2, init=False) == ["", ""]


# ---- ranks that do not come to compare -------------------------------------------------------------------------


def one_trains_alone() -> str:
    patience, comparison._PATIENCE_S = comparison._PATIENCE_S, 0.2
    try:
        return outcome_of(lambda: train_bare() if dist.get_rank() == 0 else None)[1]
    finally:
        comparison._PATIENCE_S = patience


def test_a_rank_that_suspects_nothing_is_not_waited_for() -> None:
    assert run_ranks(one_trains_alone, 2, init=False) == ["", ""]


def other_models() -> str:
    def body() -> None:
        model = nn.Linear(4, 1 + dist.get_rank())
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    return outcome_of(body)[1]


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_models_of_other_shapes_are_not_compared() -> None:
    assert run_ranks(other_models, 2, init=False) == ["", ""]


# ---- beside an engine -----------------------------------------------------------------------------------------


def train_with_criterion(optimizers: int, averages: bool, mark: str = "") -> None:
    """The criterion has a parameter, and nobody wraps it.

    Args:
        mark: an attribute of the parameter that says that each rank has its own.
    """
    model = lockstep.DistributedDataParallel(make_model())
    scale = nn.Parameter(torch.ones(1))
    if mark:
        setattr(scale, mark, mark != "allreduce")
    if optimizers == 1:
        own = [torch.optim.SGD([*model.parameters(), scale], lr=0.1)]
    else:
        own = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([scale], lr=0.1)]
    for inputs, targets in lockstep.DataLoader(samples(), BATCH):
        for optimizer in own:
            optimizer.zero_grad()
        mse_loss(model(inputs) * scale, targets).backward()
        if averages:
            average([scale.grad])  # type: ignore[list-item]
        for optimizer in own:
            optimizer.step()


def beside(optimizers: int, averages: bool, mark: str = "") -> tuple[list[str], str]:
    return outcome_of(lambda: train_with_criterion(optimizers, averages, mark))


@pytest.mark.parametrize("optimizers", [1, 2])
def test_parameters_beside_an_engine_that_nobody_averages_are_an_error_at_the_end(optimizers: int) -> None:
    """The engine's collectives between the steps hid them."""
    (told, error), (told_on_one, error_on_one) = run_ranks(beside, 2, optimizers, False, init=False)
    assert told_on_one == []
    assert len(told) == (optimizers == 1)
    for text in (error, error_on_one):
        assert text.startswith("ModelError: the 2 ranks have trained different models: SGD.step() at ")
        assert "stepped 1 parameter(s) that nobody averaged" in text
        assert "such as the criterion; or average their gradients" in text


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("mark", ["allreduce", "skip_allreduce", "tensor_model_parallel"])
def test_parameters_that_each_rank_has_its_own_of_may_be_marked(optimizers: int, mark: str) -> None:
    assert run_ranks(beside, 2, optimizers, False, mark, init=False) == [([], "")] * 2


def master_beside() -> tuple[list[str], str]:
    return outcome_of(lambda: train_with_masters(Scale()))


def test_the_master_of_a_parameter_beside_an_engine_is_found() -> None:
    (told, error), (_, other_error) = run_ranks(master_beside, 2, init=False)
    assert len(told) == 1
    for text in (error, other_error):
        assert text.startswith("ModelError: the 2 ranks have trained different models: SGD.step() at ")
        assert "stepped 1 parameter(s) that nobody averaged" in text


def train_against_attacks(*, averages: bool, num_steps: int) -> None:
    """Each batch is attacked by an optimizer of its own, as in adversarial training."""
    model = lockstep.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attacks = []  # kept, as the last one is by a script at its end
    for inputs, targets in lockstep.DataLoader(samples(), BATCH):
        delta = torch.zeros_like(inputs, requires_grad=True)
        attack = torch.optim.SGD([delta], lr=0.01)
        attacks.append(attack)
        for _ in range(num_steps):
            attacked = model if averages else model.module
            attack.zero_grad()
            mse_loss(attacked(inputs + delta), targets).neg().backward()
            attack.step()
        optimizer.zero_grad()
        mse_loss(model(inputs + delta.detach()), targets).backward()
        optimizer.step()


def attacked(averages: bool, num_steps: int) -> tuple[list[str], str]:
    return outcome_of(lambda: train_against_attacks(averages=averages, num_steps=num_steps))


@pytest.mark.parametrize(("averages", "num_steps"), [(True, 1), (True, 3), (False, 3)])
def test_optimizers_of_inputs_are_nobodys_model(averages: bool, num_steps: int) -> None:
    assert run_ranks(attacked, 2, averages, num_steps, init=False) == [([], "")] * 2


def train_two_of_which_one_is_wrapped() -> None:
    """The critic, which nobody wraps, steps several times for each step of the other."""
    model, critic = lockstep.DistributedDataParallel(make_model()), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    for inputs, targets in lockstep.DataLoader(samples(), BATCH):
        for _ in range(5):
            of_critic.zero_grad()
            mse_loss(critic(inputs), targets).backward()
            of_critic.step()
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()


def two_of_which_one_is_wrapped() -> tuple[list[str], str]:
    return outcome_of(train_two_of_which_one_is_wrapped)


def test_an_unwrapped_model_beside_a_wrapped_one() -> None:
    (told, error), (_, other_error) = run_ranks(two_of_which_one_is_wrapped, 2, init=False)
    assert len(told) == 1
    for text in (error, other_error):
        assert text.startswith("ModelError: the 2 ranks have trained different models: SGD.step() at ")


def test_parameters_beside_an_engine_that_somebody_averages_are_fine() -> None:
    assert run_ranks(beside, 2, 2, True, init=False) == [([], "")] * 2
    (told, error), _ = run_ranks(beside, 2, 1, True, init=False)
    assert error == ""
    assert len(told) == 1, "nobody knows yet"


# ---- batches that the ranks do not divide ---------------------------------------------------------------------


def train_by_torchs_engine(batch_size: int, weighs: bool) -> list[str]:
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings_of_lockstep() as told:
        for inputs, targets in lockstep.DataLoader(samples(), batch_size):
            optimizer.zero_grad()
            errors = (model(inputs) - targets).square()
            loss = lockstep.mean(errors.sum(), len(errors)) if weighs else errors.mean()
            loss.backward()
            optimizer.step()
    return told


@pytest.mark.parametrize(("batch_size", "weighs"), [(6, False), (7, False), (7, True)])
def test_batches_that_the_ranks_do_not_divide_need_an_engine_that_weights_them(batch_size: int, weighs: bool) -> None:
    found = run_ranks(train_by_torchs_engine, 2, batch_size, weighs)
    told = [text for text in found[0] if "the 2 ranks do not divide this batch of 7 samples" in text]
    assert len(told) == (batch_size == 7 and not weighs)
    assert not any("do not divide" in text for text in found[1])


# ---- after the world ------------------------------------------------------------------------------------------


def test_optimizers_step_on_when_the_watched_group_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector has taken the group, and no other is open: there is nobody to compare with."""
    monkeypatch.setattr(watch, "_watched", lambda: None)
    assert dist.group.WORLD is None
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.sum().backward()
    watch._before_step(optimizer, (), {})
    watch._after_step(optimizer, (), {})
