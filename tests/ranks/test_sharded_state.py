"""The state of a sharded optimizer: that of the plain one, at any world size; and parameters that are written to."""

from __future__ import annotations

import collections
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_checks import error_of
from lockstep import ZeroRedundancyOptimizer, checkpoint
from lockstep.errors import CheckpointError, CollectiveMismatch, ModelError
from lockstep.testing import run_ranks
from test_sharded import OPTIMIZERS, backends, backward, distance, pair

State = dict[str, Any]


def compare(one: Any, other: Any, place: str = "state") -> None:
    """Of the same form, with the same numbers."""
    if isinstance(one, dict):
        assert sorted(map(str, one)) == sorted(map(str, other)), place
        for key, value in one.items():
            compare(value, other[key], f"{place}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for position, (a, b) in enumerate(zip(one, other, strict=True)):
            compare(a, b, f"{place}[{position}]")
    elif isinstance(one, Tensor):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), place
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    else:
        assert one == other, place


def exchange_states(kind: str) -> None:
    """Into the plain optimizer and back, in the middle of a training."""
    sharded, optimizer, plain, plain_optimizer = pair(kind)
    for seed in range(3):
        for model, each in ((sharded, optimizer), (plain, plain_optimizer)):
            each.zero_grad()
            backward(model, seed)
            each.step()
    ours, theirs = optimizer.state_dict(), plain_optimizer.state_dict()
    compare(ours, theirs)
    ours, theirs = copy.deepcopy(ours), copy.deepcopy(theirs)
    assert all(each in optimizer.optim.state for each in optimizer.state)  # nothing is kept of what was whole
    # A schedule that somebody changed, and other numbers: all of it comes with the state.
    theirs["param_groups"][0]["lr"] = ours["param_groups"][0]["lr"] = 0.003
    optimizer.load_state_dict(theirs)
    plain_optimizer.load_state_dict(ours)
    for model, each in ((sharded, optimizer), (plain, plain_optimizer)):
        each.zero_grad()
        backward(model, 7)
        each.step()
    assert distance(sharded, plain) <= 1e-10
    compare(optimizer.state_dict(), plain_optimizer.state_dict())


@pytest.mark.parametrize("kind", [*OPTIMIZERS])
def test_states_are_those_of_the_plain_optimizer(kind: str) -> None:
    run_ranks(exchange_states, 2, kind)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
def test_states_at_other_sizes(world_size: int, backend: str) -> None:
    run_ranks(exchange_states, world_size, "fused adamw", backend=backend)


def save(folder: str) -> None:
    sharded, optimizer, _, _ = pair("adam")
    backward(sharded, 0)
    optimizer.step()
    state = {"model": sharded.module.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save(folder, state, step=1)


def resume(folder: str) -> list[Tensor]:
    """Loaded by other numbers of ranks; each rank of which sees the same batch."""
    sharded, optimizer, _, _ = pair("adam")
    state = checkpoint.load(folder)
    sharded.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for seed in range(2):
        optimizer.zero_grad()
        inputs = torch.randn(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        sharded(inputs).square().mean().backward()
        optimizer.step()
    return [each.detach().clone() for each in sharded.parameters()]


def test_checkpoints_go_to_other_world_sizes(tmp_path: Path) -> None:
    run_ranks(save, 3, str(tmp_path))
    alone = run_ranks(resume, 1, str(tmp_path))[0]
    for found in run_ranks(resume, 2, str(tmp_path)):
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def consolidate() -> tuple[bool, bool]:
    sharded, optimizer, plain, plain_optimizer = pair("adam")
    for model, each in ((sharded, optimizer), (plain, plain_optimizer)):
        backward(model, 0)
        each.step()
    optimizer.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        compare(optimizer.state_dict(), plain_optimizer.state_dict())  # on this rank alone
        return True, True
    assert "expected a rank of the group, 0 … 1" in str(error_of(optimizer.consolidate_state_dict, 5))
    error = error_of(optimizer.state_dict)
    return isinstance(error, CheckpointError), "on rank 1 only" in str(error)


@backends
def test_consolidate_state_dict(backend: str) -> None:
    assert run_ranks(consolidate, 2, backend=backend) == [(True, True)] * 2


def ask_on_one_rank(name: str) -> None:
    sharded, optimizer, _, _ = pair("adam")
    backward(sharded, 0)
    if dist.get_rank() == 0 and name == "clip_grad_norm_":
        nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
    optimizer.step()
    if dist.get_rank() == 0 and name != "clip_grad_norm_":
        getattr(optimizer, name)()
    backward(sharded, 1)


@backends
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("state_dict", "state_dict() or consolidate_state_dict(), which every rank calls"),
        ("consolidate_state_dict", "state_dict() or consolidate_state_dict(), which every rank calls"),
        ("full_gradients", "full"),
        ("clip_grad_norm_", "ZeroRedundancyOptimizer(Adam).step("),
    ],
)
def test_what_all_ranks_have_a_share_of_is_asked_for_by_all(backend: str, name: str, words: str) -> None:
    for error in run_ranks(ask_on_one_rank, 2, name, backend=backend, expect_errors=True):
        assert isinstance(error, CollectiveMismatch)
        assert words in str(error)


# ---- who writes parameters -------------------------------------------------------------------------------


def write() -> tuple[list[str], float]:
    """In place, by a context, by load_state_dict."""
    (sharded, optimizer, plain, plain_optimizer), errors = pair("adam"), []
    for step in range(4):
        for model, each in ((sharded, optimizer), (plain, plain_optimizer)):
            each.zero_grad()
            backward(model, step)
            each.step()
        if step == 0:
            saved = copy.deepcopy(plain.module.state_dict())
        if step == 1:
            with optimizer.changing_parameters(), torch.no_grad():
                for parameter in sharded.parameters():
                    parameter.data.mul_(0.5).add_(0.01)
            for parameter in plain.parameters():
                parameter.data.mul_(0.5).add_(0.01)
            with optimizer.changing_parameters():
                weight = sharded.module[2].weight
                weight.data = weight.data.t().contiguous().t() * 0.5
            plain.module[2].weight.data.mul_(0.5)
        if step == 2:
            sharded.module.load_state_dict(saved)
            plain.module.load_state_dict(saved)
    far = distance(sharded, plain)
    dist.barrier()
    if dist.get_rank() == 0:
        sharded.module[4].bias.data.add_(1.0)
    dist.barrier()
    backward(sharded, 5)
    errors.append(str(error_of(optimizer.step)))
    return errors, far


def test_parameters_are_written_by_all_ranks_or_none() -> None:
    for errors, far in run_ranks(write, 2):
        assert far <= 1e-10
        assert errors[0].startswith("1 parameter(s), such as 4.bias, were changed outside of")
        assert "changing_parameters" in errors[0]


def swap_averages() -> tuple[float, list[Tensor], list[Tensor]]:
    """As for an evaluation by averaged weights: `p.data` and the averages change places, and back."""
    sharded, optimizer, plain, plain_optimizer = pair("adam")
    averages = [each.detach().clone() for each in sharded.parameters()]
    expected = [each.clone() for each in averages]
    for step in range(3):
        for model, each in ((sharded, optimizer), (plain, plain_optimizer)):
            each.zero_grad()
            backward(model, step)
            each.step()
        for _ in range(2):
            with optimizer.changing_parameters():
                for position, parameter in enumerate(sharded.parameters()):
                    parameter.data, averages[position] = averages[position], parameter.data
        for ours, theirs, parameter in zip(averages, expected, plain.parameters(), strict=True):
            ours.lerp_(parameter.detach(), 0.5)
            theirs.lerp_(parameter.detach(), 0.5)
    return distance(sharded, plain), averages, expected


def test_averages_change_places_with_parameters() -> None:
    for far, averages, expected in run_ranks(swap_averages, 2):
        assert far <= 1e-12
        assert all(map(torch.equal, averages, expected))


def give_up_inside() -> bool:
    sharded, optimizer, _, _ = pair("sgd")
    before = [each.detach().clone() for each in sharded.parameters()]

    def write() -> None:
        with optimizer.changing_parameters():
            for parameter in sharded.parameters():
                parameter.data.zero_()
            raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        write()
    return all(map(torch.equal, before, sharded.parameters()))


def test_what_was_being_changed_stays_as_it_was_after_an_error() -> None:
    assert run_ranks(give_up_inside, 2) == [True, True]


def write_a_row() -> str:
    """Of many: no value that is looked at is among them."""
    sharded, optimizer, _, _ = pair("sgd")
    backward(sharded, 0)
    with torch.no_grad():
        sharded.module[2].weight[7, 1:].mul_(0.5)
    return str(error_of(optimizer.step))


def test_a_row_that_is_written_to_is_an_error() -> None:
    for text in run_ranks(write_a_row, 2):
        assert text.startswith("1 parameter(s), such as 2.weight, were changed outside of")


def replace() -> str:
    sharded, optimizer, _, _ = pair("sgd")
    sharded.module[2].weight.data = sharded.module[2].weight.data.clone()
    backward(sharded, 0)
    return str(error_of(optimizer.step))


def turn(at: int) -> str:
    """Another memory format, before any state is there or after it."""
    sharded, optimizer, _, _ = pair("adam")
    for step in range(2):
        if step == at:
            weight = sharded.module[2].weight
            weight.data = weight.data.t().contiguous().t()
        optimizer.zero_grad()
        backward(sharded, step)
        if step == at:
            return str(error_of(optimizer.step))
        optimizer.step()
    return ""


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2])
def test_elements_that_lie_otherwise_are_an_error(world_size: int, at: int) -> None:
    for text in run_ranks(turn, world_size, at, backend="gloo"):
        assert text.startswith("a parameter of ZeroRedundancyOptimizer had shape [300, 144] and strides [144, 1] when")


def reshape_inside() -> str:
    sharded, optimizer, _, _ = pair("sgd")

    def write() -> None:
        with optimizer.changing_parameters():
            sharded.module[4].bias.data = sharded.module[4].bias.data[:3]

    return str(error_of(write))


def test_what_is_changed_keeps_its_shape() -> None:
    for text in run_ranks(reshape_inside, 2):
        assert "a parameter of shape [7] and torch.float64 was given one of shape [3]" in text


def load_others() -> str:
    sharded, optimizer, _, _ = pair("sgd")
    state = {name: value + dist.get_rank() for name, value in sharded.module.state_dict().items()}
    error = error_of(sharded.module.load_state_dict, state)
    assert isinstance(error, CollectiveMismatch)
    del optimizer
    return str(error)


def test_other_memory_and_other_states_are_errors() -> None:
    for text in run_ranks(replace, 2):
        assert text.startswith("parameter 2.weight no longer uses the memory that ZeroRedundancyOptimizer gave it")
    for text in run_ranks(load_others, 2):
        assert "load_state_dict into parameters that the ranks share" in text


def step_by_others() -> tuple[str, str, str, float]:
    """A plain optimizer over shared parameters, one that was replaced, and the one that replaced it."""
    sharded, optimizer, plain, plain_optimizer = pair("sgd")
    newer = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.SGD, lr=0.1)
    for model, each in ((sharded, newer), (plain, plain_optimizer)):
        backward(model, 0)
        each.step()
    far = distance(sharded, plain)
    other = error_of(torch.optim.SGD(sharded.parameters(), lr=0.1).step)
    late = error_of(optimizer.step)
    gone = error_of(copy.deepcopy, optimizer)
    assert all(isinstance(error, ModelError) for error in (other, late, gone))
    return str(other), str(late), str(gone), far


@backends
def test_one_optimizer_steps_what_ranks_share(backend: str) -> None:
    for other, late, gone, far in run_ranks(step_by_others, 2, backend=backend):
        assert far <= 1e-12
        assert other.startswith("SGD.step(): some of its parameters belong to another ZeroRedundancyOptimizer")
        assert late.startswith("ZeroRedundancyOptimizer.step(): some of its parameters belong to another Zero")
        assert "cannot be copied or pickled" in gone


def load_a_copy() -> float:
    """What is copied, or pickled, is nobody's business but its owner's."""
    sharded, optimizer, _, _ = pair("sgd")
    assert optimizer.world_size == 2
    twin = copy.deepcopy(sharded.module)
    if dist.get_rank() == 0:
        twin.load_state_dict(nn.Module.state_dict(sharded.module))
        import pickle

        again = pickle.loads(pickle.dumps(sharded.module))
        again.load_state_dict(twin.state_dict())
        return distance(again, twin)
    return 0.0


def test_copies_load_alone() -> None:
    assert run_ranks(load_a_copy, 2) == [0.0, 0.0]


# ---- `optimizer.state` -----------------------------------------------------------------------------------


def begin_anew() -> tuple[float, list[str]]:
    """What scripts do with `optimizer.state`."""
    sharded, optimizer, plain, plain_optimizer = pair("adam")
    for step in range(5):
        for model, each in ((sharded, optimizer), (plain, plain_optimizer)):
            each.zero_grad()
            backward(model, step)
            each.step()
            if step == 0:
                each.state = collections.defaultdict(dict)
            if step == 1:
                each.state.clear()
            if step == 2:
                each.state.pop(model.module[2].weight, None)
            if step == 3:
                for state in each.state.values():  # as those do who move it to another device
                    state.update({key: value.to(value.device) for key, value in state.items()})
    weight = sharded.module[2].weight
    errors = [
        error_of(lambda: optimizer.state[weight]),
        error_of(optimizer.state.get, weight),
        error_of(optimizer.state.update, {weight: {}}),
        error_of(setattr, optimizer, "state", {weight: {}}),
    ]
    assert all(isinstance(error, ModelError) for error in errors)
    assert len(optimizer.state) == len(optimizer.optim.state)
    assert weight in optimizer.state
    assert plain.module[2].weight not in optimizer.state
    return distance(sharded, plain), [str(error) for error in errors]


@backends
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_is_begun_anew_and_not_looked_for(backend: str, world_size: int) -> None:
    for far, errors in run_ranks(begin_anew, world_size, backend=backend):
        assert far <= 1e-11  # Adam's first steps divide by small numbers
        for error in errors[:3]:
            assert error.startswith("optimizer.state[parameter]: the state of ZeroRedundancyOptimizer is sharded")
        assert "load_state_dict" in errors[3]


def change_on_one_rank(change: str) -> None:
    sharded, optimizer, _, _ = pair("adam")
    for step in range(2):
        optimizer.zero_grad()
        backward(sharded, step)
        state = copy.deepcopy(optimizer.state_dict())
        if step == 1 and change == "another":
            state["state"][2]["exp_avg"][0, 0] += dist.get_rank()
        if step == 1 and (change == "another" or (change == "load" and dist.get_rank() == 0)):
            optimizer.load_state_dict(state)
        if step == 1 and change == "clear" and dist.get_rank() == 0:
            optimizer.state.clear()
        optimizer.step()


@backends
@pytest.mark.parametrize(
    ("change", "words"),
    [("load", "after load_state_dict of 6 states"), ("another", "load_state_dict of 6"), ("clear", "without state")],
)
def test_states_are_changed_by_all_ranks_alike(backend: str, change: str, words: str) -> None:
    for error in run_ranks(change_on_one_rank, 2, change, backend=backend, expect_errors=True):
        assert isinstance(error, CollectiveMismatch)
        assert words in str(error)
