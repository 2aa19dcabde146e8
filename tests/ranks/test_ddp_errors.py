"""What `DistributedDataParallel` refuses, and what it says."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddp_checks import (
    assert_averaged,
    assert_same_on_all_ranks,
    backends,
    clear,
    data,
    error_of,
    mlp,
    num_collectives,
    twins,
)
from lockstep import DistributedDataParallel
from lockstep.agreement import collective_device
from lockstep.errors import InputError, InputTypeError, LockstepError, ModelError, ModelMismatch, NotInitialized
from lockstep.testing import run_ranks

# ---- models that differ -----------------------------------------------------------------------------------


def wider(module: nn.Sequential) -> nn.Module:
    module[2] = nn.Linear(8, 5)
    return module


def renamed(module: nn.Sequential) -> nn.Module:
    return nn.Sequential(module[0], module[1], nn.Identity(), module[2])


def frozen(module: nn.Sequential) -> nn.Module:
    module[2].bias.requires_grad_(False)
    return module


def shorter(module: nn.Sequential) -> nn.Module:
    module[2].bias = None
    return module


def longer(module: nn.Sequential) -> nn.Module:
    module.append(nn.Linear(3, 3))
    return module


def with_buffer(module: nn.Sequential) -> nn.Module:
    module.register_buffer("scale", torch.ones(2))
    return module


def laid_out_otherwise(module: nn.Sequential) -> nn.Module:
    module[2].weight = nn.Parameter(torch.randn(8, 3).t())
    return module


DIFFERENCES: dict[str, tuple[Callable[..., Any], dict[str, Any], str, str]] = {
    "shape": (wider, {}, "2.weight: float32[3, 8]", "2.weight: float32[5, 8]"),
    "dtype": (lambda module: module.double(), {}, "0.weight: float32[8, 4]", "0.weight: float64[8, 4]"),
    "name": (renamed, {}, "2.weight: float32[3, 8]", "3.weight: float32[3, 8]"),
    "requires_grad": (frozen, {}, "2.bias: float32[3]", "2.bias: float32[3] (no gradient)"),
    "missing": (shorter, {}, "2.bias: float32[3]", "bucket_cap_mb=25.0"),
    "one more": (longer, {}, "bucket_cap_mb=25.0", "3.weight: float32[3, 3]"),
    "buffer": (with_buffer, {}, "bucket_cap_mb=25.0", "scale: float32[2] (no gradient)"),
    "memory format": (laid_out_otherwise, {}, "2.weight: float32[3, 8]", "2.weight: float32[3, 8] with strides [1, 3]"),
    "buckets": (lambda module: module, {"bucket_cap_mb": 1}, "bucket_cap_mb=25.0", "bucket_cap_mb=1.0"),
    "options": (
        lambda module: module,
        {"find_unused_parameters": True},
        "find_unused_parameters=False",
        "find_unused_parameters=True",
    ),
}


def wrap_different_models() -> dict[str, str]:
    """Rank 1 of three has another model than the others."""
    messages = {}
    for name, (change, options, *_) in DIFFERENCES.items():
        module = mlp()
        if dist.get_rank() == 1:
            error = error_of(DistributedDataParallel, change(module), **options)
        else:
            error = error_of(DistributedDataParallel, module)
        assert isinstance(error, ModelMismatch)
        messages[name] = str(error)
    # The group is as good as before.
    model = DistributedDataParallel(mlp())
    model(torch.ones(2, 4)).sum().backward()
    return messages


@backends
def test_models_that_differ(backend: str) -> None:
    for messages in run_ranks(wrap_different_models, 3, backend=backend):
        for name, (_, _, here, there) in DIFFERENCES.items():
            expected = f"First difference: rank 0 has {here}; rank 1 has {there}. Build the same model"
            assert expected in messages[name], name


def start_from_the_first_rank() -> None:
    torch.manual_seed(dist.get_rank())
    module = mlp(batch_norm=True)
    module[1].running_mean.fill_(dist.get_rank() + 5)
    model = DistributedDataParallel(module)
    torch.manual_seed(0)
    for ours, first in zip(model.module.parameters(), mlp(batch_norm=True).parameters(), strict=True):
        assert torch.equal(ours, first)
    assert module[1].running_mean.tolist() == [5.0] * 8

    torch.manual_seed(dist.get_rank())
    own = mlp()
    kept = copy.deepcopy(own.state_dict())
    DistributedDataParallel(own, init_sync=False)
    assert all(torch.equal(own.state_dict()[name], value) for name, value in kept.items())


def leave_some_alone() -> None:
    """The names that scripts written for torch's engine take out of it."""
    torch.manual_seed(dist.get_rank())
    module = mlp(batch_norm=True)
    module[1].running_mean.fill_(dist.get_rank())
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, ["0.weight", "1.running_mean"]
    )
    before = module[0].weight.detach().clone()
    model = DistributedDataParallel(module)
    assert torch.equal(module[0].weight, before)
    model(torch.randn(5, 4)).sum().backward()
    own = module[0].weight.grad.clone()
    mean = own.clone()
    dist.all_reduce(mean)
    assert not torch.allclose(own, mean / 2)
    running = module[1].running_mean.clone()
    dist.broadcast(running, 0)
    assert dist.get_rank() == 0 or not torch.allclose(module[1].running_mean, running)


@backends
def test_models_start_from_the_first_rank(backend: str) -> None:
    run_ranks(start_from_the_first_rank, 2, backend=backend)
    run_ranks(leave_some_alone, 2, backend=backend)


# ---- arguments --------------------------------------------------------------------------------------------


def frozen_model() -> nn.Module:
    return mlp().requires_grad_(False)


ARGUMENTS: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "no module": (lambda: "mlp", {}, InputTypeError, "wraps a torch.nn.Module, got str"),
    "dim": (mlp, {"dim": 1}, InputError, "dim is not supported: one process gets one part of the batch"),
    "device_ids as a number": (mlp, {"device_ids": 0}, InputTypeError, "expected a list of one device, [0]"),
    "device_ids on CPU": (mlp, {"device_ids": [0]}, InputError, "device_ids is cuda:0, but parameters are on cpu"),
    "two device_ids": (mlp, {"device_ids": [0, 1]}, InputError, "device_ids=[0, 1]: each process uses one device"),
    "group": (mlp, {"process_group": "gloo"}, InputTypeError, "process_group must be a ProcessGroup or None, got str"),
    "nothing to train": (frozen_model, {}, ModelError, "no parameter of the model requires a gradient"),
    "no parameters": (nn.ReLU, {}, ModelError, "no parameter of the model requires a gradient"),
    "lazy": (lambda: nn.LazyLinear(3), {}, ModelError, "parameter weight is lazy and has no shape yet"),
    "meta": (lambda: nn.Linear(3, 3, device="meta"), {}, ModelError, "parameter weight is on the meta device"),
    "negative cap": (mlp, {"bucket_cap_mb": -1}, InputError, "bucket_cap_mb=-1: expected MiB, at least 0"),
    "no number": (mlp, {"bucket_cap_mb": float("nan")}, InputError, "bucket_cap_mb=nan"),
    "infinite cap": (mlp, {"bucket_cap_mb": float("inf")}, InputError, "bucket_cap_mb=inf"),
    "cap of text": (mlp, {"bucket_cap_mb": "25"}, InputTypeError, "bucket_cap_mb must be a number of MiB, got str"),
}


def give_bad_arguments() -> dict[str, tuple[type, str]]:
    errors = {name: error_of(DistributedDataParallel, make(), **given) for name, (make, given, *_) in ARGUMENTS.items()}
    DistributedDataParallel(mlp(), device_ids=[torch.device("cpu")], output_device="cpu", bucket_cap_mb=1e9)
    return {name: (type(error), str(error)) for name, error in errors.items()}


def test_arguments_that_cannot_be_used() -> None:
    (errors,) = run_ranks(give_bad_arguments, 1)
    for name, (_, _, kind, message) in ARGUMENTS.items():
        assert errors[name][0] is kind, name
        assert message in errors[name][1], name


def wrap_with_an_expanded_buffer() -> str:
    module = nn.Linear(3, 2)
    module.register_buffer("table", torch.ones(2).expand(3, 2))
    return str(error_of(lambda: DistributedDataParallel(module)))


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_expanded_buffer_is_named(world_size: int) -> None:
    for message in run_ranks(wrap_with_an_expanded_buffer, world_size):
        assert message.startswith("buffer table is expanded")


def test_a_group_is_needed() -> None:
    with pytest.raises(NotInitialized, match=r"Call lockstep.init\(\) first"):
        DistributedDataParallel(mlp())


def wrap_on_a_rank_outside() -> str:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        DistributedDataParallel(mlp(), process_group=group)
        return ""
    return str(error_of(DistributedDataParallel, mlp(), process_group=group))


@backends
def test_ranks_outside_the_group_are_told(backend: str) -> None:
    _, message = run_ranks(wrap_on_a_rank_outside, 2, backend=backend)
    assert message.startswith("process_group: rank 1 is not a member of the group that it passed")


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Embedding(5, 3)
        self.sparse = nn.Embedding(5, 3, sparse=True)
        self.also_dense = nn.Embedding(5, 3)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.dense(indices) + self.sparse(indices) + self.also_dense(indices)


def give_sparse_gradients() -> list[str]:
    net = Sparse()
    messages = []
    for cap in (None, 0):
        net.sparse.sparse = False
        model = DistributedDataParallel(net, bucket_cap_mb=cap)
        net.sparse.sparse = True  # as with functions, which say nothing of it
        for _ in range(2):
            error = error_of(model(torch.tensor([1, 2])).sum().backward)
            assert isinstance(error, ModelError)
            messages.append(str(error))
            model.zero_grad()
    return messages


@backends
def test_sparse_gradients_are_named(backend: str) -> None:
    for messages in run_ranks(give_sparse_gradients, 2, backend=backend):
        for message in messages:
            assert message.startswith(
                "parameter sparse.weight has a sparse gradient, which was not known when the model"
            )
            assert "an nn.Embedding or nn.EmbeddingBag with sparse=True by then" in message


def copy_it() -> list[str]:
    model, _ = twins(mlp())
    model(data(5, 4)).sum().backward()
    errors = [error_of(function, model) for function in (copy.copy, pickle.dumps)]
    copied = copy.deepcopy(model.module)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True))
    assert set(model.state_dict()) == {f"module.{name}" for name in model.module.state_dict()}
    return [str(error) for error in errors]


def test_copies_are_refused() -> None:
    for messages in run_ranks(copy_it, 2):
        assert all("copy.deepcopy(model) makes a copy" in message for message in messages)


def copy_deeply(backend: str) -> None:
    torch.manual_seed(0)
    model, plain = twins(mlp(batch_norm=True), bucket_cap_mb=0.0001)
    before = num_collectives() if backend == "lockstep" else 0
    average = AveragedModel(model)
    twin = copy.deepcopy(model)
    inputs = data(5, 4)
    assert torch.equal(twin.eval()(inputs), model.eval()(inputs))
    if backend == "lockstep":
        assert num_collectives() == before, "a rank may copy alone"
    for each in (model, plain):
        each.train()
        torch.optim.SGD(each.parameters(), lr=0.1).zero_grad()
        each(inputs).square().mean().backward()
    assert_averaged(model, plain)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    average.update_parameters(model)
    average.update_parameters(copy.deepcopy(model))
    for one, other, started in zip(average.parameters(), model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.data, other.data)
        torch.testing.assert_close(one.data, started.data + 1)
    for step in range(3):  # a copy trains by itself, and leaves the original alone
        inputs = data(5, 4, seed=step)
        clear(model, plain, twin)
        for each in (twin.train(), plain):
            each(inputs).square().mean().backward()
        assert_averaged(twin, plain)
        assert all(parameter.grad is None for parameter in model.parameters())


@backends
def test_copies_work(backend: str) -> None:
    run_ranks(copy_deeply, 2, backend, backend=backend)


class Decorated(DistributedDataParallel):
    """A wrapper with attributes, a hook and a group of its own."""

    def __init__(self, module: nn.Module, pairs: Any) -> None:
        super().__init__(module)
        self.pairs = pairs
        self.calls = 0
        self.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1


def copy_with_everything() -> None:
    model = Decorated(mlp(), dist.new_group([0, 1]))
    model.names = {"first": model.module[0].weight}
    model.first = model.module[0]
    model.extra = nn.Linear(2, 2)
    model.register_buffer("steps", torch.ones(3), persistent=False)
    seen = []
    model.register_forward_pre_hook(lambda module, _: seen.append(module))
    for trained in (False, True):
        twin = copy.deepcopy(model)
        average = AveragedModel(model)
        assert type(twin) is type(average.module) is Decorated
        assert twin.pairs is model.pairs
        assert twin.names["first"] is twin.module[0].weight is not model.module[0].weight
        assert twin.first is twin.module[0]
        assert twin.extra.weight is not model.extra.weight
        assert list(twin.state_dict()) == list(model.state_dict())
        assert [name for name, _ in twin.named_buffers()] == [name for name, _ in model.named_buffers()]
        before = model.calls
        seen.clear()
        twin(data(5, 4).float()).sum().backward()
        assert (twin.calls, model.calls, seen) == (before + 1, before, [twin])
        assert_same_on_all_ranks(*(parameter.grad for parameter in twin.module.parameters()))
        assert all((parameter.grad is not None) == trained for parameter in model.module.parameters())
        if not trained:
            model(data(5, 4).float()).sum().backward()


def test_copies_have_what_the_original_has() -> None:
    run_ranks(copy_with_everything, 2)


def wrap_renormalised(kind: type[nn.Module]) -> str:
    model = nn.Sequential(kind(8, 3, max_norm=1.0), nn.Linear(3, 1))  # type: ignore[call-arg]
    return (
        str(error_of(DistributedDataParallel, model))
        if dist.get_world_size() > 1
        else str(DistributedDataParallel(model))
    )


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_renormalises_what_it_looks_up_is_refused(kind: type[nn.Module]) -> None:
    """Each rank scaled other rows, and their weights differed from then on."""
    for error in run_ranks(wrap_renormalised, 2, kind):
        assert error.startswith(f"0 is a {kind.__name__}(max_norm=1), which rescales the rows")
        assert "weight.renorm_(2, 0, 1)" in error
    (alone,) = run_ranks(wrap_renormalised, 1, kind)
    assert "max_norm" in alone


def change_after_wrapping(how: str) -> str:
    net = mlp().double()
    model = DistributedDataParallel(net)
    state = copy.deepcopy(mlp().double().state_dict())
    torch.manual_seed(dist.get_rank() if how == "initialised" else 0)
    if how != "loaded on rank 0" or dist.get_rank() == 0:
        for layer in net if how.startswith("initialised") else ():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight)
        if how.startswith("loaded"):
            net.load_state_dict({name: value + 1 for name, value in state.items()})
    loss = model(torch.ones(2, 4, dtype=torch.float64)).mean()
    try:
        loss.backward()
    except ModelMismatch as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["initialised", "loaded on rank 0"])
def test_models_that_were_changed_after_they_were_wrapped_are_an_error(how: str) -> None:
    """Each rank trained a model of its own, from other values."""
    for error in run_ranks(change_after_wrapping, 2, how):
        assert error.startswith("ranks hold different values of ")
        assert "such as 0.weight on rank 1. All had rank 0's values when" in error


@pytest.mark.parametrize("how", ["initialised alike", "loaded on all", "not at all"])
def test_models_that_all_ranks_have_changed_alike_are_fine(how: str) -> None:
    assert run_ranks(change_after_wrapping, 2, how) == ["", ""]


# ---- devices --------------------------------------------------------------------------------------------------


def wrap_on_the_cpu() -> tuple[LockstepError, str]:
    """As on nccl, which takes tensors of the GPU alone."""
    with (
        mock.patch.object(dist, "get_backend_config", return_value="meta:lockstep"),
        mock.patch("lockstep.parallel.checks.device_types_of", return_value={"meta"}),
    ):
        return error_of(lambda: DistributedDataParallel(mlp())), collective_device(None, torch.device("cpu")).type


def test_a_model_that_was_not_moved_to_the_device() -> None:
    for error, device in run_ranks(wrap_on_the_cpu, 2):
        assert "the model is on the CPU" in str(error)
        assert "DistributedDataParallel(model.to(world.device))" in str(error)
        assert device == "meta"  # where numbers of the CPU are added up
