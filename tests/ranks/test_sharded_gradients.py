"""Gradients of which each rank has a share: what loops do with `.grad` between backward pass and step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddp_checks import error_of
from lockstep import DistributedDataParallel, ZeroRedundancyOptimizer
from lockstep.errors import ModelError
from lockstep.testing import run_ranks
from test_sharded import backends, backward, distance, net


def models(kind: Any = torch.optim.SGD, **options: Any) -> tuple[list[Any], list[Any]]:
    """A sharded one and a plain one, with their optimizers."""
    options = options or {"lr": 0.1}
    made = [DistributedDataParallel(net()) for _ in range(2)]
    return made, [
        ZeroRedundancyOptimizer(made[0].parameters(), kind, **options),
        kind(made[1].parameters(), **options),
    ]


def clip(norm_type: float) -> tuple[float, float, float]:
    """Norm and parameters: how far from those of the plain optimizer."""
    (ours, plain), optimizers = models()
    norms = []
    for seed in range(2):
        norms = []
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, seed)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=norm_type)))
            nn.utils.clip_grad_value_(model.parameters(), 0.005)
            optimizer.step()
    each = float(ours.module[2].weight.grad.norm()) - float(plain.module[2].weight.grad.norm())
    return abs(norms[0] / norms[1] - 1), distance(ours, plain), each


@backends
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_goes_by_the_whole_norm(backend: str, norm_type: float, world_size: int) -> None:
    for norm, far, each in run_ranks(clip, world_size, norm_type, backend=backend):
        assert norm <= 1e-12
        assert far <= 1e-12
        assert abs(each) <= 1e-14


def scale(bad_rank: int) -> tuple[float, float, list[bool]]:
    """GradScaler: one step that overflows on one rank, and others."""
    (ours, plain), optimizers = models(torch.optim.Adam, lr=0.01)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    moved = []
    for seed in range(4):
        before = [each.clone() for each in ours.parameters()]
        for model, optimizer, scaler in zip((ours, plain), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            inputs = torch.randn(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            if seed == 1 and torch.distributed.get_rank() == bad_rank:
                inputs[0, 0, 0, 0] = math.inf
            scaler.scale(model(inputs).square().mean()).backward()
            if seed == 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        moved.append(not all(torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True)))
    assert scalers[0].get_scale() == scalers[1].get_scale()
    return distance(ours, plain), scalers[0].get_scale(), moved


@backends
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_grad_scaler(backend: str, bad_rank: int) -> None:
    for far, _, moved in run_ranks(scale, 2, bad_rank, backend=backend):
        assert far <= 1e-12
        assert moved == [True, False, True, True]


def change() -> tuple[float, float, list[str]]:
    """Scale, zero, read and copy gradients."""
    (ours, plain), optimizers = models()
    for seed in range(3):
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=False)
            backward(model, seed)
            for position, parameter in enumerate(model.parameters()):
                assert parameter.grad is not None
                assert parameter.grad.shape == parameter.shape
                parameter.grad.mul_(0.5).div_(torch.tensor(3.0))
                if position == 1:
                    parameter.grad.zero_()
                if position == 2:
                    parameter.grad.add_(parameter.detach(), alpha=0.1)
                    parameter.grad.mul_(torch.linspace(0.0, 1.0, parameter.shape[1], dtype=torch.float64))
                    parameter.grad.mul_(torch.linspace(0.0, 1.0, len(parameter), dtype=torch.float64)[:, None])
                    parameter.grad.div_(torch.tensor([[3.0]]))
                if position == 3:
                    parameter.grad.copy_(torch.ones_like(parameter))
                    parameter.grad.masked_fill_(parameter > 0, 0.5).lerp_(parameter.detach(), 0.1)
                if position == 4:
                    parameter.grad.tanh_().pow_(2).sqrt_().abs_()
            if seed == 1:
                torch._foreach_mul_([each.grad for each in model.parameters()], 2.0)
            optimizer.step()
    full = optimizers[0].full_gradients()
    apart = max(float((a - b.grad).abs().max()) for a, b in zip(full, plain.parameters(), strict=True))
    weight = ours.module[2].weight
    reads = [weight.grad.sum, weight.grad.clone, lambda: weight.grad + 1, weight.grad.numpy, weight.grad.tolist]
    errors = [error_of(read) for read in (*reads, lambda: np.asarray(weight.grad))]
    assert "ShardedGradient" in repr(weight.grad)
    assert all(isinstance(error, ModelError) for error in errors)
    return distance(ours, plain), apart, [str(error) for error in errors]


@backends
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_can_be_changed_and_not_read(backend: str, world_size: int) -> None:
    for far, apart, errors in run_ranks(change, world_size, backend=backend):
        assert far <= 1e-12
        assert apart <= 1e-13
        for name, error in zip(("sum", "clone", "add", "numpy", "tolist", "numpy"), errors, strict=True):
            assert error.startswith(f"{name} is not supported for gradients sharded over the ranks")
            assert "optimizer.full_gradients()" in error


def put_there(but_first: bool) -> tuple[float, float, str]:
    """Gradients of two passes are read whole, changed together and put back; then some that are each rank's own."""
    (ours, plain), optimizers = models(torch.optim.Adam)
    norms = []
    for model, optimizer in zip((ours, plain), optimizers, strict=True):
        means = []
        for seed in range(2):
            optimizer.zero_grad()
            backward(model, seed)
            whole = optimizers[0].full_gradients() if model is ours else [each.grad for each in model.parameters()]
            means.append([each.clone() for each in whole])
        for position, (parameter, one, other) in enumerate(zip(model.parameters(), *means, strict=True)):
            if position or not but_first:
                parameter.grad = one - 0.1 * other
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    far, apart = distance(ours, plain), abs(norms[0] - norms[1])
    ours.module[0].bias.grad = torch.full((4,), float(torch.distributed.get_rank()), dtype=torch.float64)
    return far, apart, str(error_of(optimizers[0].step))


@backends
@pytest.mark.parametrize("but_first", [False, True])
def test_gradients_that_are_put_there_are_those_of_all_ranks(backend: str, but_first: bool) -> None:
    for far, apart, error in run_ranks(put_there, 2, but_first, backend=backend):
        assert far <= 1e-12
        assert apart <= 1e-12
        assert error.startswith(
            "a parameter of ZeroRedundancyOptimizer has a gradient that DistributedDataParallel has"
        )


def add_under_no_sync() -> tuple[float, list[str]]:
    """To an averaged gradient: what is zeroed or scaled then is all of it, and what would look at it is an error."""
    (ours, plain), optimizers = models()
    errors: list[str] = []
    for model, optimizer in zip((ours, plain), optimizers, strict=True):
        backward(model, 0)
        for seed in range(2):
            with model.no_sync():
                backward(model, 1 + seed)
            for parameter in model.parameters():
                if seed:
                    parameter.grad.mul_(0.5).div_(2.0)
                else:
                    parameter.grad.zero_()
        gradient = model.module[2].weight.grad
        reads = [gradient.norm, gradient.abs_, lambda: nn.utils.clip_grad_norm_(ours.parameters(), 1.0)]
        if model is ours:
            errors = [str(error_of(read)) for read in (*reads, optimizer.full_gradients, gradient.share_memory_)]
        backward(model, 3)
        optimizer.step()
    return distance(ours, plain), errors


@backends
def test_what_is_added_under_no_sync_changes_with_the_mean(backend: str) -> None:
    for far, errors in run_ranks(add_under_no_sync, 2, backend=backend):
        assert far <= 1e-12
        for name, error in zip(("norm", "abs_", "norm", "full_gradients()", "share_memory_"), errors, strict=True):
            late = ", before passes under no_sync() have been averaged," if name != "share_memory_" else ""
            assert error.startswith(f"{name}{late} is not supported for gradients sharded over the ranks")
