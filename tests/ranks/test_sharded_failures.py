"""What goes wrong with a sharded optimizer has a name: the rank, the option, the parameter."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_checks import error_of
from failing import AT_ONCE_S, Caught, attempt, group_works
from lockstep import DistributedDataParallel, ZeroRedundancyOptimizer
from lockstep.errors import (
    CollectiveMismatch,
    InputError,
    InputTypeError,
    ModelError,
    ModelMismatch,
    RankLost,
    SharedMemoryError,
)
from lockstep.testing import WorkerDied, limit_s, run_ranks
from test_sharded import backends, backward, distance, net


def made(cls: Any = torch.optim.SGD, **options: Any) -> tuple[Any, Any]:
    model = DistributedDataParallel(net())
    return model, ZeroRedundancyOptimizer(model.parameters(), cls, **(options or {"lr": 0.1}))


def other_class() -> None:
    made(torch.optim.SGD if dist.get_rank() else torch.optim.Adam, lr=0.1)


def other_options() -> None:
    made(torch.optim.SGD, lr=0.1 + dist.get_rank())


def other_groups() -> None:
    model = DistributedDataParallel(net())
    ZeroRedundancyOptimizer(list(model.parameters())[dist.get_rank() :], torch.optim.SGD, lr=0.1)


def other_values() -> None:
    model = DistributedDataParallel(net())
    torch.nn.init.constant_(model.module[4].bias, dist.get_rank())
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (other_class, "optimizer_class=torch.optim.adam.Adam"),
        (other_options, "options of group 0=lr=0.1;"),
        (other_groups, "parameter 0=[4, 1, 3, 3]"),
        (other_values, "parameter 5=[7] torch.float64"),
    ],
)
def test_ranks_make_the_same_optimizer(make: Callable[[], None], words: str, backend: str) -> None:
    for error in run_ranks(make, 2, expect_errors=True, backend=backend):
        assert isinstance(error, ModelMismatch)
        assert f"First difference: rank 0 has {words}" in str(error)


def other_rate() -> None:
    model, optimizer = made()
    backward(model, 0)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
    optimizer.step()


def other_gradients() -> None:
    model, optimizer = made()
    backward(model, 0)
    if dist.get_rank():
        model.module[4].bias.grad = None
    optimizer.step()


def leave_a_step_out() -> None:
    model, optimizer = made()
    for seed in range(2):
        optimizer.zero_grad()
        backward(model, seed)
        if seed or dist.get_rank():
            optimizer.step()


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (other_rate, "lr=0.2"),
        (other_gradients, "step(gradients of [0, 1, 2, 3, 4] parameters; lr=0.1"),
        (leave_a_step_out, "DistributedDataParallel's gradient averaging"),
    ],
)
def test_ranks_take_the_same_step(run: Callable[[], None], words: str) -> None:
    for error in run_ranks(run, 2, expect_errors=True):
        assert isinstance(error, CollectiveMismatch)
        assert words in str(error)
        assert "ZeroRedundancyOptimizer(SGD).step(gradients of" in str(error)


def other_rate_without_shared_memory(is_sharded: bool) -> tuple[str, bool]:
    """Between ranks each of which has the parameters; before anybody has stepped by it."""
    module = net()
    engine: Any = DistributedDataParallel if is_sharded else nn.parallel.DistributedDataParallel
    model = engine(module)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    before = [each.detach().clone() for each in module.parameters()]
    backward(model, 0)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
    error = error_of(optimizer.step)
    assert isinstance(error, CollectiveMismatch)
    return str(error), all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize(("backend", "is_sharded"), [("gloo", True), ("gloo", False), ("lockstep", False)])
def test_ranks_that_share_no_memory_take_the_same_step(backend: str, is_sharded: bool) -> None:
    for text, is_as_it_was in run_ranks(other_rate_without_shared_memory, 2, is_sharded, backend=backend):
        assert text.startswith("the ranks take different steps: rank 0 ZeroRedundancyOptimizer(SGD).step(")
        assert "lr=0.1," in text
        assert "lr=0.2," in text
        assert is_as_it_was


class Deadly(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Interrupted(Deadly):
    def step(self, closure: Any = None) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)


class Wrong(Deadly):
    def step(self, closure: Any = None) -> None:
        if dist.get_rank() == 1:
            raise ValueError("a step that went wrong")


def step_once(kind: type[Deadly]) -> Caught:
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind)
    backward(model, 0)
    try:
        return attempt(optimizer.step)
    except KeyboardInterrupt as error:
        return Caught(error, 0.0, os.getpid())


@pytest.mark.parametrize("kind", [Deadly, Interrupted])
def test_a_rank_that_dies_within_the_step(kind: type[Deadly], shm_folder: Callable[[int], Path]) -> None:
    path = shm_folder(64 << 10)
    first, second = run_ranks(step_once, 2, kind, expect_errors=True)
    if kind is Interrupted:
        assert isinstance(second.error, KeyboardInterrupt)
        assert "raised KeyboardInterrupt" in str(first.error)
    else:
        assert isinstance(second, WorkerDied)
    assert isinstance(first.error, RankLost)
    assert first.seconds < limit_s(AT_ONCE_S)
    assert f"ZeroRedundancyOptimizer({kind.__name__}).step" in str(first.error)
    assert os.listdir(path) == []


def test_a_rank_whose_step_raises() -> None:
    first, second = (each.error for each in run_ranks(step_once, 2, Wrong))
    assert isinstance(second, ValueError)
    assert isinstance(first, RankLost)
    assert "a step that went wrong" in str(first)


def make_where_memory_is_full(spare_bytes: int, folder: str) -> tuple[Caught, list[bool], float]:
    """The segments of model and group are there; then so much is left."""
    model, twin = (DistributedDataParallel(net()) for _ in range(2))
    before = [each.data_ptr() for each in model.parameters()]
    group_works()  # its slots are made by the first call
    dist.barrier()
    if dist.get_rank() == 0:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize
        with open(os.path.join(folder, "filler"), "wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, free - spare_bytes)
    dist.barrier()
    caught = attempt(lambda: ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
    after = [each.data_ptr() for each in model.parameters()]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    for seed in range(2):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            backward(each, seed)
            optimizer.step()
    return caught, [group_works(), spare_bytes > 0 or before == after], distance(model, twin)


@pytest.mark.parametrize("spare_kib", [0, 700])
def test_no_memory_for_parameters_or_for_gradients(spare_kib: int, shm_folder: Callable[[int], Path]) -> None:
    """The way out is in the error, and a plain optimizer trains what is left as it was."""
    path = shm_folder(32 << 10)
    for caught, is_well, far in run_ranks(make_where_memory_is_full, 2, spare_kib << 10, str(path)):
        assert type(caught.error) is SharedMemoryError
        assert f"shared memory in {path}: No space left on device" in str(caught.error)
        assert "point LOCKSTEP_SHM_DIR elsewhere" in str(caught.error)
        assert is_well == [True, True]
        assert far == 0.0
    assert os.listdir(path) == ["filler"]


def convert_and_edit() -> list[str]:
    """A model that is converted when the optimizer is made, and groups that get other parameters by hand."""
    model, optimizer = made()
    model.float()
    errors = [error_of(nn.functional.cross_entropy(model(torch.randn(5, 1, 8, 8)), torch.arange(5)).backward)]
    del optimizer
    model, optimizer = made()
    parameters = optimizer.param_groups[0]["params"]
    backward(model, 0)
    optimizer.param_groups[0]["params"] = parameters[2:]
    errors.append(error_of(optimizer.step))
    optimizer.param_groups[0]["params"] = parameters
    optimizer.param_groups.append({"params": [], "lr": 0.1})
    errors.append(error_of(optimizer.step))
    assert all(isinstance(error, ModelError) for error in errors)
    return [str(error) for error in errors]


@backends
def test_models_and_groups_stay_as_they_were_given(backend: str) -> None:
    for converted, *edited in run_ranks(convert_and_edit, 2, backend=backend):
        assert converted.startswith("parameters were converted from torch.float64 to torch.float32 after")
        for text in edited:
            assert text.startswith("optimizer.param_groups has parameters that ZeroRedundancyOptimizer was not given")


def use_wrongly() -> list[tuple[type, str]]:
    """On every rank alike."""
    model, optimizer = made()
    errors = [
        error_of(ZeroRedundancyOptimizer, model.parameters(), torch.optim.LBFGS),
        error_of(ZeroRedundancyOptimizer, model.parameters(), torch.optim.SparseAdam),
        error_of(ZeroRedundancyOptimizer, model.parameters(), nn.Linear),
        error_of(ZeroRedundancyOptimizer, model.parameters(), torch.optim.SGD(model.parameters(), lr=1)),
        error_of(ZeroRedundancyOptimizer, model, torch.optim.SGD),
        error_of(model.register_comm_hook, None, lambda state, bucket: None),
    ]
    with model.no_sync():
        backward(model, 0)
    errors.append(error_of(optimizer.step))
    sparse = DistributedDataParallel(nn.EmbeddingBag(10, 3, sparse=True))
    errors.append(error_of(ZeroRedundancyOptimizer, sparse.parameters(), torch.optim.SGD))
    if dist.get_backend() == "lockstep":  # where the ranks share the memory of parameters
        twice = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        twice[1].weight.data = twice[0].weight.data
        wrapped = DistributedDataParallel(twice)
        errors.append(error_of(ZeroRedundancyOptimizer, wrapped.parameters(), torch.optim.SGD))
    return [(type(error), str(error)) for error in errors]


@backends
def test_what_cannot_be_sharded_is_refused_by_name(backend: str) -> None:
    expected = [
        (InputError, "ZeroRedundancyOptimizer cannot shard LBFGS"),
        (InputError, "ZeroRedundancyOptimizer cannot shard SparseAdam"),
        (InputTypeError, "optimizer_class must be a class, such as torch.optim.AdamW, got Linear"),
        (InputTypeError, "optimizer_class must be a class, such as torch.optim.AdamW, got SGD"),
        (InputTypeError, "ZeroRedundancyOptimizer: params is the model. Pass model.parameters()"),
        (ModelError, "a communication hook would get gradients that ZeroRedundancyOptimizer has sharded"),
        (ModelError, "a parameter of ZeroRedundancyOptimizer has a gradient that DistributedDataParallel has not"),
        (InputError, "weight has sparse gradients and cannot be sharded"),
        (InputError, "parameters 0.weight and 1.weight are two views of the same memory"),
    ]
    for errors in run_ranks(use_wrongly, 2, backend=backend):
        for (kind, text), (expected_kind, words) in zip(errors, expected[: 8 + (backend == "lockstep")], strict=True):
            assert kind is expected_kind, text
            assert text.startswith(words)
