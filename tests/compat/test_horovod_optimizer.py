"""DistributedOptimizer: the training of one process on the concatenated batch, and DDP's gradients."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import lockstep
import lockstep.compat.horovod.torch as hvd
from apex_cases import clean_amp
from lockstep import log
from lockstep.compat.apex import amp
from lockstep.errors import InputError
from lockstep.testing import run_ranks

BATCH = 4
# Sums over ranks are rounded in another order than sums over a batch: a few units in the last place a step.
TOLERANCE = 2e-5


def make_model() -> nn.Sequential:
    """Small parameters and one above the size that travels alone."""
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 900), nn.Tanh(), nn.Linear(900, 3))


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The global batches, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    size = BATCH * hvd.size()
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(steps)
    ]


def own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[hvd.rank() * BATCH : (hvd.rank() + 1) * BATCH]


def compare(make: Callable[[Any], Any], passes: int = 1, tolerance: float = TOLERANCE, **options: Any) -> None:
    """Train both, step by step: losses and weights agree."""
    torch.manual_seed(hvd.rank())
    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    alone = copy.deepcopy(model)
    optimizer = make(model.parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes, **options
    )
    assert isinstance(optimizer, type(make(alone.parameters())))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    reference = make(alone.parameters())
    reference_scheduler = torch.optim.lr_scheduler.StepLR(reference, 2, 0.5)
    data = batches(4 * passes)
    for step in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        for inputs, labels in data[step * passes : (step + 1) * passes]:
            loss = cross_entropy(model(own(inputs)), own(labels))
            loss.backward()
            expected = cross_entropy(alone(inputs), labels)
            expected.backward()
            assert torch.allclose(hvd.allreduce(loss.detach()), expected.detach(), atol=tolerance), step
        optimizer.step()
        reference.step()
        scheduler.step()
        reference_scheduler.step()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=tolerance), (mine - theirs).abs().max()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-3)


def parity() -> None:
    hvd.init()
    compare(sgd)
    compare(adam)
    compare(sgd, passes=2)
    compare(sgd, gradient_predivide_factor=float(hvd.size()))
    compare(sgd, groups=2)
    compare(sgd, compression=hvd.Compression.fp16, tolerance=2e-3)  # gradients have 11 bits
    if hvd.size() == 1:
        compare(sgd, op=hvd.Sum)
    hvd.shutdown()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_losses_are_those_of_one_process(world_size: int) -> None:
    run_ranks(parity, world_size, init=False)


def test_losses_over_gloo() -> None:
    """There, each gradient is a request of its own, made in the backward pass."""
    run_ranks(parity, 2, backend="gloo")


def one_rank_exact() -> None:
    """On one rank: the bits of the plain program."""
    hvd.init()
    compare(adam, tolerance=0.0)
    hvd.shutdown()


def test_one_rank_is_bit_for_bit() -> None:
    run_ranks(one_rank_exact, 1, init=False)


def gradients_of_ddp() -> None:
    hvd.init()
    torch.manual_seed(0)
    model = make_model()
    ddp = lockstep.DistributedDataParallel(copy.deepcopy(model))
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    for inputs, labels in batches(3):
        optimizer.zero_grad()
        ddp.zero_grad()
        cross_entropy(model(own(inputs)), own(labels)).backward()
        cross_entropy(ddp(own(inputs)), own(labels)).backward()
        optimizer.synchronize()
        for mine, theirs in zip(model.parameters(), ddp.module.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad)
    hvd.shutdown()


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_those_of_ddp_bit_for_bit(world_size: int) -> None:
    run_ranks(gradients_of_ddp, world_size, init=False)


def rules() -> None:
    hvd.init()
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

    def backward() -> None:
        mse_loss(model(torch.ones(1, 2)), torch.zeros(1, 1)).backward()

    backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"without optimizer.skip_synchronize\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    backward()
    optimizer.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
    optimizer.set_backward_passes_per_step(2)
    optimizer.zero_grad()
    backward()
    backward()
    optimizer.step()
    with pytest.raises(ValueError, match="once"):
        hvd.DistributedOptimizer(optimizer)
    # Another optimizer for the same parameters takes over when the first is gone.
    del optimizer
    gc.collect()
    second = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    second.zero_grad()
    backward()
    second.step()
    hvd.shutdown()


def test_rules_of_step_and_zero_grad() -> None:
    run_ranks(rules, 2, init=False)


def branches() -> None:
    """Ranks that use different parameters, in different orders, and wait for other things in between."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    heads = nn.ModuleList([nn.Linear(3, 1) for _ in range(size)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(heads.parameters(), lr=1.0), heads.named_parameters())
    heads[rank](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for head in heads:
        assert head.weight.grad is not None
        assert torch.allclose(head.weight.grad, torch.full((1, 3), 1 / size))
    optimizer.zero_grad()
    sum(head(torch.ones(1, 3)).sum() for head in heads).backward()
    # Rank 0 steps first, the others reduce a metric first: whoever waits sends complete gradients ahead.
    if rank == 0:
        optimizer.step()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="metric").item() == size if rank else True
    if rank:
        optimizer.step()
    else:
        hvd.allreduce(torch.ones(1), op=hvd.Sum, name="metric")
    hvd.shutdown()


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
def test_ranks_with_other_branches(backend: str) -> None:
    run_ranks(branches, 2, backend=backend)


def sparse_and_others() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    results = []
    for as_dense in (False, True):
        table = nn.Embedding(7, 2, sparse=True)
        with torch.no_grad():
            table.weight.fill_(1.0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), sparse_as_dense=as_dense
        )
        table(torch.tensor([rank, 5])).sum().backward()
        optimizer.step()
        results.append(table.weight.detach().clone())
    expected = torch.ones(7, 2)
    expected[:size] -= 1 / size
    expected[5] -= 1.0
    assert torch.allclose(results[0], expected)
    assert torch.allclose(results[1], expected)
    # Adasum of equal changes is the change.
    model = nn.Linear(2, 1)
    hvd.broadcast_parameters(list(model.named_parameters()), root_rank=0)
    before = model.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), op=hvd.Adasum)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.allclose(model.weight.detach(), before - 0.5, atol=1e-6)
    with pytest.raises(AssertionError, match="not supported when using Adasum"):
        optimizer.skip_synchronize()
    # A closure's gradients are averaged, and LBFGS sees the average loss.
    weight = nn.Parameter(torch.tensor([4.0]))
    lbfgs = hvd.DistributedOptimizer(torch.optim.LBFGS([weight], lr=0.5, max_iter=10))

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = (weight - rank).square().sum()
        loss.backward()
        return loss

    for _ in range(4):
        lbfgs.step(closure)
    assert torch.allclose(weight.detach(), torch.tensor([(size - 1) / 2]), atol=1e-3)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(lbfgs, root_rank=0)
    hvd.shutdown()


def test_sparse_gradients_adasum_and_closures() -> None:
    run_ranks(sparse_and_others, 2, init=False)


def joined_optimizer() -> None:
    """Rank r has r + 1 batches, then joins: its zeros count in the averages of the others."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    for _ in range(rank + 1):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    hvd.join()
    expected = -sum((size - step) / size for step in range(rank + 1))
    assert torch.allclose(weight.detach(), torch.full((2,), expected))
    hvd.shutdown()


def joined_optimizer_and_warnings() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log.get_logger("lockstep").addHandler(handler)
    joined_optimizer()
    log.get_logger("lockstep").removeHandler(handler)
    return messages


def test_optimizer_while_ranks_join() -> None:
    assert run_ranks(joined_optimizer_and_warnings, 3, init=False) == [[]] * 3  # a mismatch is how ranks notice a join


def state_of_root() -> None:
    """The root's state as it is, whatever the others have."""
    hvd.init()
    rank = hvd.rank()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1), betas=(0.9, 0.9 + 0.01 * rank))
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert not optimizer.state  # nobody has made a step, so nobody has any state
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.91)
    if rank == 1:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    states = hvd.allgather_object(optimizer.state_dict()["state"])
    assert states[0].keys() == states[1].keys() == {0, 1}
    for number, key in ((0, "exp_avg"), (1, "exp_avg_sq"), (0, "step")):
        assert torch.equal(states[0][number][key], states[1][number][key])
    with pytest.raises(ValueError, match="invalid params"):
        hvd.broadcast_parameters(3, root_rank=0)
    for params in (
        optimizer.state_dict(),
        list(optimizer.state_dict().items()),
        {"model": model.state_dict(), "epoch": 3},
    ):
        with pytest.raises(
            InputError, match=r"no tensor among .*hvd\.broadcast_optimizer_state\(optimizer, root_rank\)"
        ):
            hvd.broadcast_parameters(params, root_rank=0)
    weight = torch.full((2,), float(rank))
    for allowed in ({"weight": weight, "_extra_state": {}}, {"inner._extra_state": {"a": 1}}, {}, iter(())):
        hvd.broadcast_parameters(allowed, root_rank=1)
    assert weight.tolist() == [1.0, 1.0]
    hvd.shutdown()


def test_broadcast_optimizer_state() -> None:
    run_ranks(state_of_root, 2, init=False)


def normalized() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    values = torch.randn(3 * size, 4, generator=torch.Generator().manual_seed(1))
    layer, whole = hvd.SyncBatchNorm(num_features=4), nn.BatchNorm1d(4)
    mine = values[3 * rank : 3 * rank + 3].clone().requires_grad_()
    result = layer(mine)
    assert torch.allclose(result, whole(values)[3 * rank : 3 * rank + 3], atol=1e-6)
    assert torch.allclose(layer.running_var, whole.running_var, atol=1e-6)
    result.square().sum().backward()
    hvd.shutdown()


def test_sync_batch_norm_on_the_cpu() -> None:
    run_ranks(normalized, 2, init=False)


def test_names_are_checked_before_anything_else() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for named, text in (
        ([("a", model.weight), ("a", model.bias)], "Found duplicates: a"),
        ([("a", model.weight)], "were not named"),
        ([model.weight, model.bias], "sequence of tuples"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(optimizer, named_parameters=named)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="predivide_factor not supported"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="must be > 0"):
        hvd.DistributedOptimizer(optimizer, backward_passes_per_step=0)
    with pytest.raises(ValueError, match="only appear once"):
        hvd.DistributedOptimizer(optimizer, groups=[[model.weight], [model.weight]])
    with pytest.warns(DeprecationWarning, match="num_groups"), pytest.raises(ValueError, match="positive integer"):
        hvd.DistributedOptimizer(optimizer, num_groups=-1)


def changed_in_between() -> None:
    """What the script does to `.grad` between backward and step counts, wherever the gradient lies."""
    hvd.init()
    torch.manual_seed(0)
    # Large enough to be left where autograd wrote it.
    model = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    inputs = torch.ones(1, 300)
    for how in ("first step", "in place", "replaced", "dropped", "accumulated"):
        optimizer.zero_grad(set_to_none=how != "accumulated")
        model(inputs).sum().backward()
        own = []
        for parameter in model.parameters():
            assert parameter.grad is not None
            if how == "in place":
                parameter.grad.mul_(3.0)
            elif how == "replaced":
                parameter.grad = torch.full_like(parameter, float(hvd.rank()))
            elif how == "dropped":
                parameter.grad = None
            own.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())
        optimizer.step()
        for parameter, whole in zip(model.parameters(), own, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, hvd.allreduce(whole)), how
    hvd.shutdown()


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_may_change_before_the_step(world_size: int) -> None:
    run_ranks(changed_in_between, world_size, init=False)


# ---- with Apex's amp ------------------------------------------------------------------------------


def amp_before_horovod() -> None:
    """Steps would leave out what amp does behind them: masters are not published, overflows not skipped."""
    hvd.init()
    for level, options in (("O1", {}), ("O2", {}), ("O2", {"loss_scale": 1.0}), ("O0", {"loss_scale": 8.0})):
        with clean_amp():
            net = nn.Linear(4, 4)
            model, optimizer = amp.initialize(net, sgd(net.parameters()), opt_level=level, verbosity=0, **options)
            for op in (hvd.Average, hvd.Adasum):
                with pytest.raises(InputError, match=r"call amp\.initialize\(model, optimizer\) with the result"):
                    hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op)
    with clean_amp():  # Nothing is scaled, and nothing has a master: amp does nothing for a step.
        model, optimizer = amp.initialize((net := nn.Linear(4, 4)), sgd(net.parameters()), opt_level="O0", verbosity=0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        before = model.weight.detach().clone()
        with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert not torch.equal(model.weight, before)
    hvd.shutdown()


@pytest.mark.parametrize("world_size", [1, 2])
def test_amp_before_horovod_is_refused(world_size: int) -> None:
    run_ranks(amp_before_horovod, world_size, init=False)


def amp_behind_horovod(level: str) -> list[list[float]]:
    """Horovod's documented order. Infinite gradients of one rank skip the step on all."""
    hvd.init()
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    weights = []
    with clean_amp():
        optimizer = hvd.DistributedOptimizer(sgd(net.parameters()), net.named_parameters())
        model, optimizer = amp.initialize(net, optimizer, opt_level=level, verbosity=0)
        for step, (inputs, labels) in enumerate(batches(3)):
            optimizer.zero_grad()
            loss = cross_entropy(model(own(inputs)), own(labels))
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                (scaled_loss * (float("inf") if step == 1 and hvd.rank() == 0 else 1.0)).backward()
                optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            weights.append(model.weight.detach().float().flatten().tolist())
    hvd.shutdown()
    return weights


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_amp_behind_horovod_trains(level: str, world_size: int) -> None:
    first, *others = run_ranks(amp_behind_horovod, world_size, level, init=False)
    assert first[0] == first[1] != first[2], "the second step is skipped"
    assert all(other == first for other in others)


def accumulate_with_amp(level: str, reduces: str, late: bool) -> None:
    """Two micro-batches for a step; `reduces` says where Horovod's optimizer does."""
    hvd.init()
    torch.manual_seed(0)
    net, plain = make_model(), make_model()
    plain.load_state_dict(net.state_dict())
    with clean_amp():
        wrapped = hvd.DistributedOptimizer(sgd(net.parameters()), net.named_parameters(), backward_passes_per_step=2)
        model, optimizer = amp.initialize(net, wrapped, opt_level=level, loss_scale=256.0, verbosity=0)
        for last, (inputs, labels) in enumerate(batches(2)):
            cross_entropy(plain(inputs), labels).backward()
            loss = cross_entropy(model(own(inputs)), own(labels))
            with amp.scale_loss(loss, optimizer, delay_unscale=late and not last) as scaled_loss:
                scaled_loss.backward()
                if last and reduces == "inside":
                    optimizer.synchronize()
        if reduces == "behind":
            optimizer.synchronize()
        with contextlib.nullcontext() if reduces == "at the step" else optimizer.skip_synchronize():
            optimizer.step()
        reference = sgd(plain.parameters())
        reference.step()
        for mine, theirs in zip(amp.master_params(optimizer), plain.parameters(), strict=True):
            tolerance = TOLERANCE if level == "O0" else 1e-2
            assert torch.allclose(mine, theirs, atol=tolerance, rtol=tolerance), (mine - theirs).abs().max()
    hvd.shutdown()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("level", "reduces", "late"),
    [
        ("O0", "inside", True),
        ("O2", "inside", True),
        ("O0", "at the step", False),  # nothing has been reduced before the sum is there
        ("O0", "behind", False),
    ],
)
def test_accumulation_with_amp(level: str, reduces: str, late: bool, world_size: int) -> None:
    run_ranks(accumulate_with_amp, world_size, level, reduces, late, init=False)


@pytest.mark.parametrize(
    ("level", "reduces", "late", "advice"),
    [
        ("O0", "inside", False, "Pass delay_unscale=True"),
        ("O2", "inside", False, "Pass delay_unscale=True"),
        ("O2", "at the step", False, "Call optimizer.synchronize() inside"),
        ("O2", "at the step", True, "Call optimizer.synchronize() inside"),
        ("O2", "behind", False, "Call optimizer.synchronize() inside"),
        ("O2", "behind", True, "Call optimizer.synchronize() inside"),
    ],
)
def test_accumulation_with_amp_that_leaves_gradients_out(level: str, reduces: str, late: bool, advice: str) -> None:
    run_ranks(accumulate_with_amp, 1, level, reduces, late, init=False)
    for error in run_ranks(accumulate_with_amp, 2, level, reduces, late, init=False, expect_errors=True):
        assert isinstance(error, RuntimeError)
        assert advice in str(error)
