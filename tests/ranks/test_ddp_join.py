"""`join`: ranks that run out of batches at different times, as with torch's engine."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import lockstep
from ddp_checks import Heads, assert_same_on_all_ranks, backends, data, mlp
from lockstep import DistributedDataParallel
from lockstep.errors import CollectiveMismatch
from lockstep.testing import run_ranks


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def train(model: nn.Module, num_batches: int, *, inputs_of: Any = None) -> list[Tensor]:
    """Parameters after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = []
    for step in range(num_batches):
        inputs = data(5, 4, seed=step) if inputs_of is None else inputs_of(step)
        optimizer.zero_grad()
        output = model(inputs)
        output = torch.cat(output, 1) if isinstance(output, tuple) else output
        output.square().mean().backward()
        optimizer.step()
        history.append(flat(model))
    return history


def compare_with_torch(
    batches_of_ranks: list[int], options: dict[str, Any], divide_by_initial_world_size: bool
) -> None:
    num_batches = batches_of_ranks[dist.get_rank()]
    peer_group = dist.new_group(backend="gloo")
    for make in (mlp, lambda: mlp(batch_norm=True), Heads):
        torch.manual_seed(1)
        module = make().double()
        theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(module), process_group=peer_group, **options)
        ours = DistributedDataParallel(module, **options)
        histories = []
        for model in (ours, theirs):
            with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
                histories.append(train(model, num_batches))
        for step, (one, other) in enumerate(zip(*histories, strict=True)):
            assert torch.allclose(one, other, rtol=0, atol=1e-12), f"step {step} of {make}"
        # Buffers are not compared: torch gives them out a step later, by when another rank is the last.
        assert_same_on_all_ranks(flat(ours), *ours.buffers())
        assert torch.allclose(flat(ours), flat(theirs), rtol=0, atol=1e-12)
        for name, buffer in ours.module.named_buffers():
            if name.endswith("num_batches_tracked"):
                assert buffer.item() == max(batches_of_ranks), "buffers come from a rank that still trains"
        train(ours, 2)  # outside the context, on all ranks, everything is as before
        assert_same_on_all_ranks(flat(ours))


def accumulate_while_others_have_joined() -> None:
    """Steps under no_sync have nothing for the joined ranks to answer."""
    rank = dist.get_rank()
    model, twin = DistributedDataParallel(mlp().double()), None
    twin = nn.parallel.DistributedDataParallel(copy.deepcopy(model.module))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        with each.join():
            for window in range(3 if rank == 0 else 1):
                optimizer.zero_grad()
                with each.no_sync():
                    each(data(5, 4, seed=window)).sum().backward()
                each(data(5, 4, seed=window + 10)).sum().backward()
                optimizer.step()
    assert torch.allclose(flat(model), flat(twin), rtol=0, atol=1e-12)


def train_epochs_that_clear_behind_the_step(model: nn.Module, cuts_window: bool) -> list[Tensor]:
    """Two epochs, of which rank 0 leaves each a micro-batch earlier; the parameters behind each step.

    Args:
        model: an engine, torch's or ours.
        cuts_window: steps are of two micro-batches, and what rank 0 has accumulated is left to the next epoch.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = 2 if cuts_window else 1
    history = []
    for epoch in range(2):
        with model.join():
            for step in range(3 * window + dist.get_rank() - 1 if cuts_window else 1 + dist.get_rank()):
                averages = step % window == window - 1
                with contextlib.nullcontext() if averages else model.no_sync():
                    model(data(5, 4, seed=10 * epoch + step)).square().mean().backward()
                if averages:
                    optimizer.step()
                    optimizer.zero_grad()
                    history.append(flat(model))
    return history


def clear_behind_the_step(cuts_window: bool) -> None:
    torch.manual_seed(1)
    module = mlp().double()
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(module), process_group=dist.new_group(backend="gloo"))
    ours = DistributedDataParallel(module)
    histories = [train_epochs_that_clear_behind_the_step(model, cuts_window) for model in (ours, theirs)]
    for step, (one, other) in enumerate(zip(*histories, strict=True)):
        assert torch.allclose(one, other, rtol=0, atol=1e-12), f"step {step}"
    assert_same_on_all_ranks(flat(ours))
    for one, other in zip(ours.module.parameters(), theirs.module.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.allclose(one.grad, other.grad, rtol=0, atol=1e-12)


def leave_heads_out() -> None:
    """With find_unused_parameters a joined rank uses nothing, and others use different parameters."""
    rank = dist.get_rank()
    model = DistributedDataParallel(Heads().double(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    start = model.module.right.weight.detach().clone()
    with model.join():
        for step in range([3, 1, 2][rank]):
            optimizer.zero_grad()
            model(data(5, 4, seed=step), "left").square().mean().backward()
            assert model.module.right.weight.grad is None
            optimizer.step()
    assert torch.equal(model.module.right.weight, start)
    assert_same_on_all_ranks(flat(model))


def throw_early() -> str:
    model = DistributedDataParallel(mlp().double())
    try:
        with model.join(throw_on_early_termination=True):
            train(model, 1 + dist.get_rank())
    except RuntimeError as error:
        # Everybody is told at the same point, and training may continue.
        train(model, 1)
        assert_same_on_all_ranks(flat(model))
        return str(error)
    return ""


def turned_off() -> None:
    model = DistributedDataParallel(mlp().double())
    with model.join(enable=False):
        train(model, 2)
    assert_same_on_all_ranks(flat(model))


def train_behind_the_context() -> str:
    """Twice in one context; then with other data on each rank, which the checks outside of it refuse."""
    model = DistributedDataParallel(mlp().double())
    context = model.join()
    for _ in range(2):
        with context:
            train(model, 1 + dist.get_rank())
    assert_same_on_all_ranks(flat(model))
    try:
        train(model, 1, inputs_of=lambda step: data(5 + dist.get_rank(), 4))
    except CollectiveMismatch as error:
        return str(error)
    return ""


class WithOwn(nn.Module):
    """Tensors of which each rank has its own: a parameter and buffers, one of them of another size on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 1, dtype=torch.float64)
        self.own = nn.Parameter(torch.full((2,), float(dist.get_rank()), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1 + dist.get_rank()))
        self.register_buffer("count", torch.zeros(()))
        self._ddp_params_and_buffers_to_ignore = ["own", "seen"]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.shared(inputs)


def leave_alone(broadcast_buffers: bool) -> list[float]:
    """What a rank has of its own parameter and buffers at the end; of the parameters all have the same."""
    model = DistributedDataParallel(WithOwn(), broadcast_buffers=broadcast_buffers)
    rank = dist.get_rank()
    with model.join():
        train(model, 2 + rank)
        model.module.seen.fill_(rank)
        model.module.count.fill_(rank)
    assert_same_on_all_ranks(model.module.shared.weight)
    return [*model.module.own.tolist(), *model.module.seen.tolist(), model.module.count.item()]


def join_with_sharded_optimizer(divide_by_initial_world_size: bool) -> None:
    """A joined rank continues updating its shard: it gets the averaged gradients, too."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns on import, of torch.jit

    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_batches = [3, 1, 2]
    torch.manual_seed(2)
    module = mlp().double()
    plain = copy.deepcopy(module)
    model = DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05)
    with Join([model, optimizer], divide_by_initial_world_size=divide_by_initial_world_size):
        for step in range(num_batches[rank]):
            optimizer.zero_grad()
            model(data(5, 4, seed=step)).square().mean().backward()
            optimizer.step()
    assert_same_on_all_ranks(flat(model))

    reference = torch.optim.Adam(plain.parameters(), lr=0.05)
    for step in range(max(num_batches)):
        training = [each for each in range(world_size) if num_batches[each] > step]
        reference.zero_grad()
        for each in training:
            generator = torch.Generator().manual_seed(1000 * step + each)
            inputs = torch.randn(5, 4, generator=generator, dtype=torch.float64)
            divisor = world_size if divide_by_initial_world_size else len(training)
            (plain(inputs).square().mean() / divisor).backward()
        reference.step()
    assert torch.allclose(flat(model), flat(plain), rtol=0, atol=1e-12)


def join_by_torch(divide_by_initial_world_size: bool) -> None:
    """torch's engine on this group and on gloo."""
    histories = []
    for group in (None, dist.new_group(backend="gloo")):
        torch.manual_seed(1)
        model = nn.parallel.DistributedDataParallel(mlp().double(), process_group=group)
        with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
            train(model, 2 + 2 * dist.get_rank())
        histories.append(flat(model))
    assert torch.allclose(*histories, rtol=0, atol=1e-12)


# How many rows ranks hold in each of their steps; the second leaves first.
ROWS = ([3, 4, 2, 3], [1], [2, 0, 5])


def join_with_other_numbers_of_rows(how: str, divide_by_initial_world_size: bool) -> None:
    """Each step is that of one process on the rows of all ranks that train."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(mlp().double())
    plain = copy.deepcopy(model.module)
    optimizer, reference = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    draw = torch.Generator().manual_seed(0)
    steps = [[torch.randn(rows, 4, generator=draw, dtype=torch.float64) for rows in of_rank] for of_rank in ROWS]
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for x in steps[rank]:
            optimizer.zero_grad()
            if how == "two passes":
                with model.no_sync():
                    model(x).square().mean().backward()
                model(x * 2).square().mean().backward()
            elif how == "samples":
                with model.samples(len(x)):
                    model(x[None]).square().mean().backward()  # one row, which is none of samples
            else:
                model(x).square().mean().backward()
            optimizer.step()
    for step in range(max(map(len, ROWS))):
        training = [each for each in range(3) if len(ROWS[each]) > step]
        x = torch.cat([steps[each][step] for each in training])
        reference.zero_grad()
        loss = plain(x).square().mean()
        if how == "two passes":
            loss = loss + plain(x * 2).square().mean()
        (loss * (len(training) / world_size if divide_by_initial_world_size else 1)).backward()
        reference.step()
    assert_same_on_all_ranks(flat(model))
    assert (flat(model) - flat(plain)).abs().max() <= 1e-12


def losses_within_join() -> None:
    """What is no mean over samples, while all train; a filler counts nothing."""
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(1, 1).double())
    rows = torch.arange(3.0).double()[:, None]
    for count in ((3, 2), (3, 0)):
        with model.join():
            x, weight = rows[: count[rank] or 1] + rank, torch.tensor(5.0 if rank == 0 else 0.0)
            model.zero_grad()
            with model.samples(count[rank]):
                loss = lockstep.mean(model(x).sum() * 3, weight)
            loss.backward()
        counted = torch.cat([rows + 0, rows[: count[1]] + 1])
        assert model.module.weight.grad is not None
        assert (model.module.weight.grad - 3 * counted.sum() / 5).abs().max() <= 1e-12
        expected = 3 * model.module(counted).sum() / 5
        assert (loss - expected).abs() <= 1e-12


@pytest.mark.parametrize("divide_by_initial_world_size", [True, False])
@pytest.mark.parametrize("how", ["rows", "two passes", "samples"])
def test_other_numbers_of_rows_are_weighted(how: str, divide_by_initial_world_size: bool) -> None:
    run_ranks(join_with_other_numbers_of_rows, 3, how, divide_by_initial_world_size)


@pytest.mark.parametrize("divide_by_initial_world_size", [True, False])
def test_torchs_engine_joins_on_this_group(divide_by_initial_world_size: bool) -> None:
    run_ranks(join_by_torch, 2, divide_by_initial_world_size)


def test_losses_within_join() -> None:
    run_ranks(losses_within_join, 2)


@backends
@pytest.mark.parametrize("divide_by_initial_world_size", [True, False])
@pytest.mark.parametrize("batches_of_ranks", [[5, 2, 0], [0, 2, 4]])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.0001}], ids=str)
def test_uneven_inputs_as_with_torch(
    backend: str, batches_of_ranks: list[int], options: dict[str, Any], divide_by_initial_world_size: bool
) -> None:
    run_ranks(compare_with_torch, 3, batches_of_ranks, options, divide_by_initial_world_size, backend=backend)


@backends
@pytest.mark.parametrize("check", [accumulate_while_others_have_joined, turned_off])
def test_join_idioms(backend: str, check: Any) -> None:
    run_ranks(check, 2, backend=backend)


@backends
@pytest.mark.parametrize("cuts_window", [False, True])
def test_a_rank_that_has_left_keeps_its_own_gradients(backend: str, cuts_window: bool) -> None:
    """What it answers with is no part of its next step."""
    run_ranks(clear_behind_the_step, 2, cuts_window, backend=backend)


def test_behind_the_context_all_checks_are_back() -> None:
    for message in run_ranks(train_behind_the_context, 2):
        assert "with model.samples(n)" in message


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_the_end_of_join_leaves_alone_what_the_engine_does(broadcast_buffers: bool) -> None:
    first, second = run_ranks(leave_alone, 2, broadcast_buffers)
    assert first == [0.0, 0.0, 0.0, 1.0 if broadcast_buffers else 0.0]
    assert second == [1.0, 1.0, 1.0, 1.0, 1.0]


@backends
def test_join_with_unused_parameters(backend: str) -> None:
    run_ranks(leave_heads_out, 3, backend=backend)


@backends
def test_early_termination_is_thrown_on_all_ranks(backend: str) -> None:
    first, *others = run_ranks(throw_early, 3, backend=backend)
    assert first == "Rank 0 exhausted all inputs."
    assert others == ["Detected at least one rank that exhausted inputs. Throwing across all ranks."] * 2


@backends
@pytest.mark.parametrize("divide_by_initial_world_size", [True, False])
def test_join_with_a_sharded_optimizer(backend: str, divide_by_initial_world_size: bool) -> None:
    run_ranks(join_with_sharded_optimizer, 3, divide_by_initial_world_size, backend=backend)
