"""`apex.parallel` on one and two ranks: gradients, batch statistics and rates are what the originals define."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import lockstep
from apex_cases import Net, batches, clean_amp, make_net, make_sgd, same_parameters
from lockstep.compat.apex import amp
from lockstep.compat.apex.parallel import (
    LARC,
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    multiproc,
)
from lockstep.compat.apex.parallel.distributed import flat_dist_call
from lockstep.errors import InputError, InputTypeError, LaunchError, NotInitialized
from lockstep.launch.config import LaunchConfig
from lockstep.testing import run_ranks


def own_batch(step: int = 0) -> tuple[Tensor, Tensor]:
    return batches(1, seed=100 * step + dist.get_rank())[0]


def backward(model: nn.Module, step: int = 0) -> None:
    images, labels = own_batch(step)
    functional.cross_entropy(model(images), labels).backward()


def summed(tensor: Tensor) -> Tensor:
    """Collective."""
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def check_gradients(plain: nn.Module, model: nn.Module, factor: float, tolerance: float = 1e-6) -> None:
    """The engine's gradients are `factor` times the sum of the plain copies'. Collective."""
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, summed(theirs.grad) * factor, rtol=tolerance, atol=tolerance)


def reduce_gradients() -> None:
    world_size = dist.get_world_size()
    cases: list[tuple[dict[str, Any], float]] = [
        ({}, 1 / world_size),
        ({"delay_allreduce": True}, 1 / world_size),
        ({"message_size": 10}, 1 / world_size),
        ({"gradient_average": False}, 1.0),
        ({"gradient_predivide_factor": 4.0}, 1 / world_size),
        ({"gradient_average": False, "gradient_predivide_factor": 4.0}, 0.25),
        ({"gradient_average_split_factor": 2.0}, 1 / world_size),
        ({"allreduce_always_fp32": True}, 1 / world_size),
        ({"device_ids": [0], "num_allreduce_streams": 2}, 1 / world_size),
    ]
    for options, factor in cases:
        plain = make_net(dist.get_rank())
        model = DistributedDataParallel(copy.deepcopy(plain), **options)
        plain.load_state_dict(model.module.state_dict())
        assert same_parameters(plain, make_net(0)), "parameters are those of the first rank"
        for step in range(2):
            for each in (plain, model):
                each.zero_grad()
                backward(each, step)
            check_gradients(plain, model, factor)
        # Buffers stay each rank's own, as in Apex.
        assert torch.equal(model.module.norm.running_mean, plain.norm.running_mean)


def sum_halves_in_float32() -> None:
    """Gradients whose sum leaves float16, divided afterwards."""
    weight = nn.Linear(1, 1, bias=False).half()
    model = DistributedDataParallel(weight, allreduce_always_fp32=True)
    (model(torch.ones(1, 1).half()) * 40000).sum().backward()
    assert weight.weight.grad is not None
    assert weight.weight.grad.item() == 40000


def accumulate() -> None:
    plain = make_net()
    model = DistributedDataParallel(make_net())
    model.disable_allreduce()
    backward(model, 0)
    backward(plain, 0)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    model.enable_allreduce()
    backward(model, 1)
    backward(plain, 1)
    check_gradients(plain, model, 1 / dist.get_world_size())


def switch_between_the_passes() -> None:
    """As NVIDIA's BERT does it: what holds is what was said last before the backward pass."""
    plain = make_net()
    model = DistributedDataParallel(make_net(), delay_allreduce=True)
    for step in range(4):
        images, labels = own_batch(step)
        loss = functional.cross_entropy(model(images), labels)
        last = step % 2 == 1
        (model.enable_allreduce if last else model.disable_allreduce)()
        loss.backward()
        backward(plain, step)
        if last:
            check_gradients(plain, model, 1 / dist.get_world_size())
            plain.zero_grad()
            model.zero_grad()
        else:
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, inputs: Tensor, left: bool) -> Tensor:
        return (self.left if left else self.right)(inputs)


def leave_parameters_unused() -> None:
    model = DistributedDataParallel(Branching())
    for left in (True, False, True):
        model.zero_grad()
        model(torch.ones(1, 2), left).sum().backward()
        assert (model.module.left.weight.grad is None) != left
        assert (model.module.right.weight.grad is None) == left


def refuse() -> None:
    for options in ({"shared_param": True}, {"retain_allreduce_buffers": True}, {"allreduce_communicators": ([], [])}):
        with pytest.raises(InputError):
            DistributedDataParallel(make_net(), **options)
    with pytest.raises(InputTypeError, match="a list of tensors, got str"):
        Reducer("model")
    with pytest.raises(RuntimeError, match="wrapped in DistributedDataParallel already"):
        amp.initialize(DistributedDataParallel(make_net()), verbosity=0)


def reduce_when_told() -> None:
    world_size = dist.get_world_size()
    model = make_net(dist.get_rank())
    reducer = Reducer(model)
    plain = copy.deepcopy(model)
    assert same_parameters(plain, make_net(0)) or dist.get_rank() > 0  # buffers are the rank's own
    for each in (model, plain):
        backward(each)
    reducer.reduce()
    check_gradients(plain, model, 1 / world_size)
    tensors = [torch.full((2, 2), float(dist.get_rank())), torch.tensor(1.0).double()]
    Reducer(tensors).reduce()
    assert tensors[0].tolist() == [[(world_size - 1) / 2] * 2] * 2
    assert tensors[1].item() == 1.0


def call_on_flat_tensors() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = [nn.Parameter(torch.full(shape, float(rank))) for shape in ((2, 2), ())]
    count = torch.tensor([2 * rank], dtype=torch.float64)
    flat_dist_call([*parameters, count, torch.empty(0)], dist.all_reduce)
    mean = (world_size - 1) / 2
    assert [each.tolist() for each in parameters] == [[[mean] * 2] * 2, mean]
    assert count.item() == 2 * mean
    flat_dist_call([each.data.fill_(rank) for each in parameters], dist.broadcast, (world_size - 1,))
    assert [each.unique().tolist() for each in parameters] == [[world_size - 1]] * 2


def all_engine_checks() -> None:
    reduce_gradients()
    sum_halves_in_float32()
    accumulate()
    switch_between_the_passes()
    leave_parameters_unused()
    refuse()
    reduce_when_told()
    call_on_flat_tensors()


def train_with_amp(level: str) -> list[float]:
    """Three steps with masters or casts on all ranks; the ranks end with the same parameters."""
    with clean_amp():
        model, optimizer = amp.initialize((net := make_net()), make_sgd(net), opt_level=level, verbosity=0)
        model = DistributedDataParallel(convert_syncbn_model(model))
        losses = []
        for step in range(4):
            images, labels = own_batch(step)
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                # An overflow on one rank skips the step on all.
                (scaled_loss * (float("inf") if step == 2 and dist.get_rank() == 0 else 1.0)).backward()
            optimizer.step()
            losses.append(loss.item())
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 1}
    for parameter in model.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(parameter, first)
    return losses


def accumulate_with_amp() -> None:
    """Two micro-batches, only the second of which is reduced: `delay_unscale` gives the mean of both."""
    plain = make_net()
    with clean_amp():
        # Without casts, so that only scaling and reducing are seen.
        model, optimizer = amp.initialize(
            (net := make_net()), make_sgd(net), opt_level="O0", loss_scale=256.0, verbosity=0
        )
        model = DistributedDataParallel(model)
        for step, last in ((0, False), (1, True)):
            (model.enable_allreduce if last else model.disable_allreduce)()
            images, labels = own_batch(step)
            loss = functional.cross_entropy(model(images), labels)
            with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
                scaled_loss.backward()
            backward(plain, step)
        check_gradients(plain, model, 1 / dist.get_world_size())


def accumulate_wrongly(level: str) -> None:
    """Without `delay_unscale` the first micro-batch would never be reduced: an error, on every rank."""
    with clean_amp():
        model, optimizer = amp.initialize(
            (net := make_net()), make_sgd(net), opt_level=level, loss_scale=256.0, verbosity=0
        )
        model = DistributedDataParallel(model)

        def run(step: int, late: bool = False) -> None:
            images, labels = own_batch(step)
            loss = functional.cross_entropy(model(images), labels)
            with amp.scale_loss(loss, optimizer, delay_unscale=late) as scaled_loss:
                scaled_loss.backward()

        model.disable_allreduce()
        run(0)
        run(1)
        model.enable_allreduce()
        if dist.get_world_size() == 1:
            run(2)
        else:
            with pytest.raises(RuntimeError, match="Pass delay_unscale=True"):
                run(2)
        for way in (optimizer.step, optimizer.zero_grad):  # what was accumulated is gone: nothing to complain of
            model.disable_allreduce()
            optimizer.zero_grad()
            run(3)
            way()
            optimizer.zero_grad()
            model.enable_allreduce()
            run(4)
            optimizer.step()


def train_under_no_sync(model: nn.Module, net: nn.Module, optimizer: Any, late: bool) -> None:
    """Two micro-batches, the first under `no_sync()`."""
    optimizer.zero_grad()
    for step, last in ((0, False), (1, True)):
        with contextlib.nullcontext() if last else model.no_sync():  # type: ignore[operator]
            images, labels = own_batch(step)
            loss = functional.cross_entropy(model(images), labels)
            with amp.scale_loss(loss, optimizer, delay_unscale=late and not last) as scaled_loss:
                scaled_loss.backward()


def accumulate_under_no_sync(kind: str, level: str) -> None:
    """As with `disable_allreduce()`, whose engine it is."""
    plain = make_net()
    with clean_amp():
        net, optimizer = amp.initialize(
            (net := make_net()), make_sgd(net), opt_level=level, loss_scale=256.0, verbosity=0
        )
        makers = {"torch": nn.parallel.DistributedDataParallel, "ours": lockstep.DistributedDataParallel}
        model = makers.get(kind, DistributedDataParallel)(net)
        if dist.get_world_size() == 1:
            train_under_no_sync(model, net, optimizer, late=False)
        else:
            with pytest.raises(RuntimeError, match=r"no_sync\(\).* Pass delay_unscale=True"):
                train_under_no_sync(model, net, optimizer, late=False)
        train_under_no_sync(model, net, optimizer, late=True)
        backward(plain, 0)
        backward(plain, 1)
        for ours, theirs in zip(amp.master_params(optimizer), plain.parameters(), strict=True):
            # Running means of the normalization have moved; gradients of a 16-bit model have 11 bits.
            expected = summed(theirs.grad) / dist.get_world_size()
            tolerance = 1e-6 if level == "O0" else 2e-2
            torch.testing.assert_close(ours.grad, expected, rtol=tolerance, atol=tolerance)
        # Every step with gradients of the rank's own, and gradients that are zero: nothing to complain of.
        optimizer.step()
        for late_zero in (False, True):
            with model.no_sync():
                images, labels = own_batch(2)
                with amp.scale_loss(functional.cross_entropy(model(images), labels), optimizer) as scaled_loss:
                    scaled_loss.backward()
            if late_zero:
                optimizer.zero_grad(set_to_none=False)
            else:
                optimizer.step()
                optimizer.zero_grad()
            with amp.scale_loss(functional.cross_entropy(model(images), labels), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def normalize() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = torch.randn(4 * world_size, 3, 5, generator=torch.Generator().manual_seed(0))
    own = whole[4 * rank : 4 * rank + 4]
    expected = nn.BatchNorm1d(3)(whole)[4 * rank : 4 * rank + 4]
    torch.testing.assert_close(SyncBatchNorm(3)(own), expected)
    last = SyncBatchNorm(3, channel_last=True)(own.movedim(1, -1))
    torch.testing.assert_close(last.movedim(-1, 1), expected)
    torch.testing.assert_close(SyncBatchNorm(3, channel_last=True)(own[:, :, 0]), SyncBatchNorm(3)(own[:, :, 0]))
    torch.testing.assert_close(SyncBatchNorm(3, fuse_relu=True)(own, own), (expected + own).relu())
    group = create_syncbn_process_group(1)
    alone = SyncBatchNorm(3, process_group=group)(own)
    torch.testing.assert_close(alone, nn.BatchNorm1d(3)(own))
    assert create_syncbn_process_group(0) is None
    both = create_syncbn_process_group(world_size)
    torch.testing.assert_close(SyncBatchNorm(3, process_group=both)(own), expected)
    with pytest.raises(InputError, match="expected a divisor"):
        create_syncbn_process_group(world_size + 1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_engine_and_reducer(world_size: int) -> None:
    run_ranks(all_engine_checks, world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_accumulation_under_an_engine(world_size: int) -> None:
    run_ranks(accumulate_with_amp, world_size)
    for level in ("O1", "O2"):
        run_ranks(accumulate_wrongly, world_size, level)


@pytest.mark.parametrize("kind", ["torch", "ours", "apex"])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_accumulation_under_no_sync(kind: str, level: str) -> None:
    run_ranks(accumulate_under_no_sync, 2, kind, level)
    if level == "O0":
        run_ranks(accumulate_under_no_sync, 1, kind, level)


def test_accumulation_under_no_sync_over_gloo() -> None:
    run_ranks(accumulate_under_no_sync, 2, "torch", "O0", backend="gloo")


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("forgets", [False, True])
def test_a_pass_that_fails_leaves_nothing_behind(level: str, forgets: bool) -> None:
    """As where CUDA runs out of memory, and the program tries again, or forgets gradients and takes the next batch."""
    with clean_amp():
        net = nn.Linear(2, 1, bias=False)
        model, optimizer = amp.initialize(net, make_sgd(net), opt_level=level, loss_scale=8.0, verbosity=0)
        inputs = torch.ones(1, 2)
        with amp.scale_loss(model(inputs).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        with contextlib.suppress(MemoryError), amp.scale_loss(model(inputs).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
            raise MemoryError
        if forgets:
            optimizer.zero_grad()
        with amp.scale_loss(model(inputs).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        (weight,) = amp.master_params(optimizer)
        assert torch.equal(weight.grad, inputs if forgets else 2 * inputs)


def train_beside_a_half_made_engine() -> None:
    """torch refused it, and somebody has kept the error, and with its traceback the engine."""
    with pytest.raises(RuntimeError, match="requires a gradient") as kept:
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))
    net = nn.Linear(2, 2)
    with clean_amp():
        model, optimizer = amp.initialize(net, make_sgd(net), opt_level="O1", verbosity=0)
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    del kept


def test_amp_beside_a_half_made_engine() -> None:
    run_ranks(train_beside_a_half_made_engine, 1)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_amp_under_an_engine(level: str) -> None:
    alone = run_ranks(train_with_amp, 1, level)[0]
    together = run_ranks(train_with_amp, 2, level)
    assert alone[0] != together[0][0] or alone[1:] != together[0][1:]
    assert together == run_ranks(train_with_amp, 2, level), "repeats bit for bit"


def test_engine_over_gloo() -> None:
    run_ranks(reduce_gradients, 2, backend="gloo")


@pytest.mark.parametrize("world_size", [1, 2])
def test_batch_normalization(world_size: int) -> None:
    run_ranks(normalize, world_size)


def test_conversion() -> None:
    model = convert_syncbn_model(nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(Net())), channel_last=True)
    assert type(model[0]) is type(model[1][0].norm) is SyncBatchNorm
    assert model[0].channel_last
    assert not model[0].fuse_relu
    again = model[0]
    assert convert_syncbn_model(model)[0] is again
    assert again.channel_last, "what is converted already stays as it is"
    plain = nn.BatchNorm1d(2)
    assert type(convert_syncbn_model(plain)) is SyncBatchNorm


def test_without_a_process_group() -> None:
    with pytest.raises(NotInitialized):
        Reducer(make_net())
    with pytest.raises(NotInitialized):
        create_syncbn_process_group(2)


# ---- LARC -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [True, False])
def test_larc_scales_each_gradient(clip: bool) -> None:
    """lr = trust * |w| / (|g| + decay * |w| + eps), at most the optimizer's own if clipped."""
    rate, decay, trust = 0.5, 0.1, 0.02
    weights = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0]), torch.tensor([1000.0]), torch.tensor([1.0])]
    gradients = [torch.tensor([0.6, 0.8]), torch.tensor([1.0, 1.0]), torch.tensor([1e-3]), None]
    parameters = [nn.Parameter(each.clone()) for each in weights]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    optimizer = LARC(torch.optim.SGD(parameters, lr=rate, weight_decay=decay), trust, clip)
    optimizer.step()
    for parameter, weight, gradient in zip(parameters, weights, gradients, strict=True):
        if gradient is None:
            expected = weight
        elif not weight.any():
            expected = weight - rate * gradient
        else:
            adaptive = trust * weight.norm() / (gradient.norm() + decay * weight.norm() + 1e-8)
            adaptive = min(adaptive / rate, 1.0) if clip else adaptive
            expected = weight - rate * adaptive * (gradient + decay * weight)
        torch.testing.assert_close(parameter.detach(), expected)
    assert optimizer.param_groups[0]["weight_decay"] == decay
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    optimizer.zero_grad()
    assert len(optimizer.param_groups) == 2
    assert copy.deepcopy(optimizer).trust_coefficient == trust


# ---- multiproc ------------------------------------------------------------------------------------


def test_multiproc_starts_a_rank_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[LaunchConfig] = []
    monkeypatch.setattr(multiproc, "launch_job", lambda config: started.append(config) or 3)
    monkeypatch.setattr(multiproc, "resolve_nproc", lambda nproc, variables: 4)
    assert multiproc.main(["main.py", "--rank", "7", "-b", "2", "--world-size=9", "data"]) == 3
    (config,) = started
    assert (config.target, config.nproc) == ("main.py", 4)
    assert config.args_of(2) == ("--rank=2", "--world-size", "4", "-b", "2", "data")
    with pytest.raises(LaunchError, match="name a script"):
        multiproc.main([])


def test_names_are_locksteps_own() -> None:
    assert issubclass(DistributedDataParallel, lockstep.DistributedDataParallel)
    assert issubclass(SyncBatchNorm, lockstep.SyncBatchNorm)
