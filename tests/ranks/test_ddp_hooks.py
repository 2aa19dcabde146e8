"""Communication hooks: torch's own, and what a hook gets to see."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from ddp_checks import assert_averaged, assert_same_on_all_ranks, backends, clear, data, error_of, mlp, twins
from lockstep import DistributedDataParallel
from lockstep.errors import InputTypeError, ModelError
from lockstep.testing import run_ranks


def bf16_hook(state, bucket):
    """torch's engine refuses its own hook by name where there is no NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


HOOKS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "allreduce": (default_hooks.allreduce_hook, lambda: None),
    "fp16": (default_hooks.fp16_compress_hook, lambda: None),
    "bf16": (bf16_hook, lambda: None),
    "fp16 around allreduce": (
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        lambda: None,
    ),
    "PowerSGD": (
        powerSGD_hook.powerSGD_hook,
        lambda: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2),
    ),
}


def compare_with_torch(name: str) -> None:
    """The same hook under both engines, with the same buckets."""
    hook, make_state = HOOKS[name]
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(module))
    ours = DistributedDataParallel(module)
    for model in (ours, theirs):
        model.register_comm_hook(make_state(), hook)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for step in range(5):
        inputs = data(5, 4, seed=step).float()
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            torch.manual_seed(step)  # PowerSGD draws
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(one.grad, other.grad, rtol=1e-2 if "PowerSGD" in name else 0, atol=1e-6), step
        assert_same_on_all_ranks(*ours.parameters())


@backends
@pytest.mark.parametrize("name", list(HOOKS))
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.filterwarnings("ignore")
def test_hooks_of_torch_do_what_they_do_under_torch(backend: str, name: str, world_size: int) -> None:
    run_ranks(compare_with_torch, world_size, name, backend=backend)


def use_builtin_hook(kind: str) -> None:
    """Under torch's engine, beside the same hook in Python."""
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
    models = [nn.parallel.DistributedDataParallel(copy.deepcopy(module)) for _ in range(2)]
    models[0]._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
    hook = default_hooks.fp16_compress_hook if kind == "FP16_COMPRESS" else default_hooks.allreduce_hook
    models[1].register_comm_hook(None, hook)
    for model in models:
        model(data(5, 4, seed=dist.get_rank()).float()).square().mean().backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert_same_on_all_ranks(*(each.grad for each in models[0].parameters()))


@backends
@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
def test_builtin_hooks_of_torchs_engine(backend: str, kind: str) -> None:
    run_ranks(use_builtin_hook, 2, kind, backend=backend)


def average_parameters_now_and_then() -> None:
    model, plain = twins(mlp())
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=dist.new_group([dist.get_rank()]), start_localSGD_iter=2
    )
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    for step in range(6):
        clear(model, plain)
        plain.load_state_dict(model.module.state_dict())
        for each in (model, plain):
            each(data(5, 4, seed=step)).square().mean().backward()
        if step < 2:
            assert_averaged(model, plain)
        else:
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad), "only the own rank's gradient by now"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        averager.average_parameters(model.parameters())
    # Averaged in step 2 and 4; step 5 moved them apart again.
    averager.step = 4
    averager.average_parameters(model.parameters())
    assert_same_on_all_ranks(*model.parameters())


@backends
def test_post_local_sgd(backend: str) -> None:
    run_ranks(average_parameters_now_and_then, 2, backend=backend)


def look_at_buckets() -> list[tuple[Any, ...]]:
    """Sees each bucket once per synced backward pass, in order; what the future gives becomes the gradient."""
    model, plain = twins(mlp(batch_norm=True), bucket_cap_mb=0)
    seen: list[tuple[Any, ...]] = []

    def hook(state: list[Any], bucket: Any) -> torch.futures.Future[torch.Tensor]:
        parameters, gradients = bucket.parameters(), bucket.gradients()
        assert [g.shape for g in gradients] == [p.shape for p in parameters]
        assert sum(g.sum() for g in gradients) == pytest.approx(bucket.buffer().sum().item())
        names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        state.append((bucket.index(), bucket.is_last(), [names[id(parameter)] for parameter in parameters]))
        dist.all_reduce(bucket.buffer())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() / dist.get_world_size() * 2)
        return future

    model.register_comm_hook(seen, hook)
    error = error_of(model.register_comm_hook, seen, hook)
    assert isinstance(error, ModelError)
    assert "only one is allowed" in str(error)
    for seed in range(2):
        seen.clear()
        inputs = data(5, 4, seed=seed)
        with model.no_sync():
            model(inputs).square().mean().backward()
        assert seen == []
        clear(model)
        for each in (model, plain):
            each(inputs).square().mean().backward()
        assert_averaged(model, plain, scale=2.0)
        clear(model, plain)
        if dist.get_world_size() > 1:
            assert_same_on_all_ranks(*model.buffers())
    return seen


@backends
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_hook_sees(backend: str, world_size: int) -> None:
    order = ["3.bias", "3.weight", "1.bias", "1.weight", "0.bias", "0.weight"]
    expected = [(index, index == 5, [name]) for index, name in enumerate(order)]
    assert run_ranks(look_at_buckets, world_size, backend=backend) == [expected] * world_size


def misbehave() -> list[str]:
    model, _ = twins(mlp(batch_norm=True))
    errors = [error_of(model.register_comm_hook, None, "no function")]
    assert isinstance(errors[0], InputTypeError)

    def hook(state: Any, bucket: Any) -> Any:
        if not state:
            return bucket.buffer()
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    state: list[int] = []
    model.register_comm_hook(state, hook)
    errors.append(error_of(model(data(5, 4)).sum().backward))
    # Mended, the next step works.
    state.append(1)
    clear(model)
    model(data(5, 4)).sum().backward()
    assert_same_on_all_ranks(*(parameter.grad for parameter in model.parameters()))
    return [str(error) for error in errors]


@backends
def test_hooks_that_misbehave(backend: str) -> None:
    for not_callable, no_future in run_ranks(misbehave, 2, backend=backend):
        assert not_callable == "a communication hook must be callable, got str"
        assert no_future.startswith("the communication hook returned Tensor; expected a torch.futures.Future")
