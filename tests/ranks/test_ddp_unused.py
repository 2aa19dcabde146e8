"""Parameters that a step leaves out, graphs that never change, checkpointing, and gradients that come twice."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_checks import Heads, assert_averaged, assert_same_on_all_ranks, backends, clear, data, error_of, mlp, twins
from lockstep import DistributedDataParallel, SyncBatchNorm
from lockstep.errors import ModelError, UnusedParameters
from lockstep.testing import run_ranks

# ---- unused parameters -----------------------------------------------------------------------------------


def leave_a_head_out(options: dict[str, Any]) -> tuple[str, str]:
    """The error of a step that leaves a head out, and that of one that only returns it."""
    model, plain = twins(Heads(), **options)
    inputs = data(5, 4)
    loss = model(inputs, "left").sum()
    error = error_of(loss.backward)
    assert isinstance(error, UnusedParameters)
    clear(model)

    # The next step works again.
    for each in (model, plain):
        left, right = each(inputs)
        (left.sum() + right.square().sum()).backward()
    assert_averaged(model, plain)
    clear(model, plain)

    # An output that is not in the loss could still have a backward pass of its own. It has none:
    left, _ = model(inputs)
    left.sum().backward()
    late = error_of(model, inputs)
    assert isinstance(late, UnusedParameters)
    clear(model)
    for _ in range(2):
        for each in (model, plain):
            left, right = each(inputs)
            (left.sum() + right.square().sum()).backward()
        assert_averaged(model, plain)
        clear(model, plain)
    return str(error), str(late)


@backends
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0}], ids=str)
def test_unused_parameters_are_named(backend: str, world_size: int, options: dict[str, Any]) -> None:
    for rank, (error, late) in enumerate(run_ranks(leave_a_head_out, world_size, options, backend=backend)):
        assert error.startswith(
            f"2 parameter(s) got no gradient on rank {rank} in this step: right.weight, right.bias. "
        )
        assert "find_unused_parameters=True" in error
        assert late.startswith(
            f"2 parameter(s) got no gradient on rank {rank} in the previous step: right.weight, right.bias. "
        )
        assert "outputs of the model that the loss did not use" in late


def find_unused(bucket_cap_mb: float | None) -> None:
    """Which head a rank uses changes from step to step."""
    model, plain = twins(Heads(), find_unused_parameters=True, bucket_cap_mb=bucket_cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    rank = dist.get_rank()
    for step, uses in enumerate(
        [
            ["left", "left", "left"],
            ["left", "right", "both"],
            ["right", "right", "left"],
            ["both", "both", "both"],
            ["right", "right", "right"],
        ]
    ):
        use = uses[rank]
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for each in (model, plain):
            output = each(data(5, 4, seed=step), use)
            output = output if isinstance(output, Tensor) else torch.cat(output, 1)
            output.square().mean().backward()
        assert_averaged(model, plain)
        optimizer.step()
        assert_same_on_all_ranks(*model.parameters())
        for parameter, old in zip(model.parameters(), before, strict=True):
            # Neither momentum nor weight decay touches what nobody used.
            assert torch.equal(parameter, old) == (parameter.grad is None)
        plain.load_state_dict(model.module.state_dict())
        clear(model, plain)


def find_unused_beside_sync_batchnorm() -> None:
    """The collectives of the layer's backward pass come between buckets, which differ in when they are full."""
    net = Heads()
    net.trunk = nn.Sequential(net.trunk, SyncBatchNorm(8))
    model = DistributedDataParallel(net.double(), find_unused_parameters=True, bucket_cap_mb=0)
    for step in range(3):
        clear(model)
        model(data(5, 4, seed=step), ["left", "right"][dist.get_rank()]).square().mean().backward()
        assert_same_on_all_ranks(*[parameter.grad for parameter in model.parameters() if parameter.grad is not None])


def return_an_output_that_is_not_used() -> None:
    model, plain = twins(Heads(), find_unused_parameters=True)
    for step in range(3):
        for each in (model, plain):
            each(data(5, 4, seed=step))[dist.get_rank() % 2].square().mean().backward()
        assert_averaged(model, plain)
        clear(model, plain)
        for each in (model, plain):  # on all ranks the same one
            each(data(5, 4, seed=step))[0].square().mean().backward()
        assert_averaged(model, plain)
        clear(model, plain)


class Blocked(torch.autograd.Function):
    """Gives its second argument no gradient, although the graph has a path to it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, scale: Tensor) -> Tensor:
        return inputs * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Blocking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return Blocked.apply(self.linear(inputs), self.scale)


def block_a_gradient() -> str:
    model, _ = twins(Blocking())
    error = error_of(model(data(5, 4)).sum().backward)
    model, plain = twins(Blocking(), find_unused_parameters=True)
    for each in (model, plain):
        each(data(5, 4)).sum().backward()
    assert_averaged(model, plain)
    return str(error)


@backends
@pytest.mark.parametrize("bucket_cap_mb", [None, 0])
def test_each_rank_may_leave_out_others(backend: str, bucket_cap_mb: float | None) -> None:
    run_ranks(find_unused, 3, bucket_cap_mb, backend=backend)


@backends
def test_each_rank_may_leave_out_others_beside_sync_batchnorm(backend: str) -> None:
    run_ranks(find_unused_beside_sync_batchnorm, 2, backend=backend)


def leave_to_the_script(by_method: bool) -> tuple[list[float], list[float]]:
    """The gradients of a head that torch's engine would leave alone, and of the other, each times the rank plus one."""
    net = Heads()
    names = ["right.weight", "right.bias"]
    if by_method:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
    else:
        net._ddp_params_and_buffers_to_ignore = names
    model = DistributedDataParallel(net)
    left, right = model(torch.ones(1, 4))
    ((left.sum() + right.sum()) * (dist.get_rank() + 1)).backward()
    return net.left.bias.grad.tolist(), net.right.bias.grad.tolist()


@pytest.mark.parametrize("by_method", [False, True])
def test_parameters_may_be_left_to_the_script(by_method: bool) -> None:
    expected = [([1.5] * 3, [factor] * 2) for factor in (1.0, 2.0)]
    assert run_ranks(leave_to_the_script, 2, by_method) == expected


@backends
def test_outputs_may_be_left_out_of_the_loss(backend: str) -> None:
    run_ranks(return_an_output_that_is_not_used, 2, backend=backend)


def test_a_path_without_a_gradient_counts_as_unused() -> None:
    for error in run_ranks(block_a_gradient, 2):
        assert "in this step: scale. " in error


# ---- graphs that do not change ---------------------------------------------------------------------------


def keep_the_graph(late: bool) -> list[str]:
    """static_graph: the first step shows which parameters are used; ranks may differ in them.

    Args:
        late: say so when the engine is there.
    """
    model, plain = twins(Heads(), static_graph=not late)
    if late:
        model._set_static_graph()
    rank = dist.get_rank()
    use = ["left", "right", "both"][rank]
    for step in range(3):
        for each in (model, plain):
            output = each(data(5, 4, seed=step), use)
            output = output if isinstance(output, Tensor) else torch.cat(output, 1)
            output.square().mean().backward()
        assert_averaged(model, plain)
        clear(model, plain)
    one_head, plain = twins(Heads(), static_graph=True)
    for step in range(3):
        for each in (one_head, plain):
            each(data(5, 4, seed=step), "left").square().mean().backward()
        assert_averaged(one_head, plain)
        clear(one_head, plain)
    return [str(error_of(one_head(data(5, 4), "right").sum().backward))]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool, repeat: int = 1) -> None:
        super().__init__()
        self.block = mlp(batch_norm=True)
        self.head = nn.Linear(3, 3)
        self.use_reentrant = use_reentrant
        self.repeat = repeat

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = [checkpoint(self.block, inputs, use_reentrant=self.use_reentrant) for _ in range(self.repeat)]
        return self.head(torch.stack(outputs).sum(0))


def use_checkpoints(use_reentrant: bool, repeat: int, options: dict[str, Any]) -> None:
    model, plain = twins(Checkpointed(use_reentrant, repeat), **options)
    for step in range(3):
        inputs = data(5, 4, seed=step).requires_grad_()
        for each in (model, plain):
            each(inputs).square().mean().backward()
        assert_averaged(model, plain)
        clear(model, plain)


def checkpoint_the_engine(use_reentrant: bool) -> None:
    """The forward pass of the engine is itself repeated inside a backward pass."""
    model, plain = twins(mlp(), bucket_cap_mb=0)
    for step in range(3):
        inputs = data(5, 4, seed=step).requires_grad_()
        for each in (model, plain):
            # Whether a forward pass is repeated is each rank's own business.
            repeats = dist.get_rank() == 0
            output = checkpoint(each, inputs, use_reentrant=use_reentrant) if repeats else each(inputs)
            output.square().mean().backward()
        assert_averaged(model, plain)
        clear(model, plain)


def checkpoint_one_of_two_passes(outside_first: bool) -> None:
    """One backward pass runs the engine's own one inside a checkpoint, and another one outside."""
    model, plain = twins(nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 300), nn.Linear(300, 2)), bucket_cap_mb=0)
    for step in range(3):
        inside, outside = (data(5, 4, seed=seed).requires_grad_() for seed in (step, step + 50))
        for each in (model, plain):
            # Autograd begins with what was computed last.
            calls = [partial(each, outside), partial(checkpoint, each, inside, use_reentrant=True)]
            outputs = [call() for call in (reversed(calls) if outside_first else calls)]
            sum(output.square().mean() for output in outputs).backward()
        assert_averaged(model, plain)
        clear(model, plain)


@backends
@pytest.mark.parametrize("late", [False, True])
def test_static_graph_has_unused_parameters(backend: str, late: bool) -> None:
    for (error,) in run_ranks(keep_the_graph, 3, late, backend=backend):
        assert "in this step: left.weight, left.bias. static_graph=True requires" in error


@backends
@pytest.mark.parametrize(
    ("use_reentrant", "repeat", "options"),
    [
        (False, 1, {}),
        (False, 2, {"bucket_cap_mb": 0}),
        (False, 2, {"static_graph": True}),
        (True, 1, {"static_graph": True}),
        (True, 3, {"static_graph": True, "bucket_cap_mb": 0}),
        (True, 1, {}),
    ],
)
def test_checkpointing(backend: str, use_reentrant: bool, repeat: int, options: dict[str, Any]) -> None:
    run_ranks(use_checkpoints, 2, use_reentrant, repeat, options, backend=backend)


@backends
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_engine_itself_under_a_checkpoint(backend: str, use_reentrant: bool) -> None:
    run_ranks(checkpoint_the_engine, 2, use_reentrant, backend=backend)


@backends
@pytest.mark.parametrize("outside_first", [False, True])
def test_a_checkpointed_pass_beside_another(backend: str, outside_first: bool) -> None:
    run_ranks(checkpoint_one_of_two_passes, 2, outside_first, backend=backend)


# ---- a gradient that comes after its bucket has gone ------------------------------------------------------


def reuse_a_checkpointed_block() -> list[str]:
    """With re-entrant checkpoints each use of a block gives its parameters a gradient of its own."""
    model, plain = twins(Checkpointed(True, repeat=2), bucket_cap_mb=0)
    inputs = data(5, 4).requires_grad_()
    error = error_of(model(inputs).sum().backward)
    clear(model)
    recovers = error_of(model(inputs).sum().backward)
    clear(model)
    # Deferred, it would have been right: so it is where gradients were there already.
    for each in (model, plain):
        each.zero_grad(set_to_none=False)
        for parameter in each.parameters():
            parameter.grad = torch.zeros_like(parameter)
        each(inputs).square().sum().backward()
    assert_averaged(model, plain)
    return [f"{type(each).__name__}: {each}" for each in (error, recovers)]


def walk_a_trunk_twice() -> str:
    model, _ = twins(Heads(), bucket_cap_mb=0)
    left, right = model(data(5, 4))
    left.sum().backward(retain_graph=True)  # learns that the trunk's gradients are there, and sends them
    error = error_of(right.sum().backward)
    assert isinstance(error, ModelError)
    return str(error)


@backends
def test_a_second_gradient_is_an_error_that_names_it(backend: str) -> None:
    for errors in run_ranks(reuse_a_checkpointed_block, 2, backend=backend):
        for error in errors:
            assert error.startswith("ModelError: parameter block.")
            assert "received a second gradient in one backward pass" in error
            assert "static_graph=True" in error
    for error in run_ranks(walk_a_trunk_twice, 2, backend=backend):
        assert error.startswith("parameter trunk.")
        assert "received a second gradient" in error


# ---- losses that do not pass the outputs -------------------------------------------------------------------


class Remembering(nn.Module):
    """Keeps its loss; what it returns has no part in it."""

    def __init__(self) -> None:
        super().__init__()
        self.unused_first = nn.Linear(4, 3)
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> str:
        self.loss = self.linear(inputs).square().mean()
        return "done"


def reach_parameters_on_another_way() -> str:
    model, plain = twins(mlp())
    for step in range(2):
        inputs = data(5, 4, seed=step)
        # A term on the parameters alone, with a backward pass of its own, before that of the loss.
        for each in (model, plain):
            loss = each(inputs).square().mean()
            sum(parameter.square().sum() for parameter in each.parameters()).backward()
            loss.backward()
        assert_averaged(model, plain)
        clear(model, plain)
    remembering = DistributedDataParallel(Remembering())
    remembering(torch.ones(1, 4))
    return str(error_of(remembering.module.loss.backward))


@backends
def test_gradients_may_come_on_other_ways(backend: str) -> None:
    for error in run_ranks(reach_parameters_on_another_way, 2, backend=backend):
        assert "in this step: unused_first.weight, unused_first.bias" in error
