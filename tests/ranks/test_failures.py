"""Ranks that come for different things: an error on every one of them at once, and the group continues."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from ddp_checks import warnings_of_lockstep
from failing import Caught, attempt, expect, group_works, line_of, ranks_named
from lockstep import checkpoint, metrics
from lockstep.comm.symmetric_memory import symmetric_empty
from lockstep.errors import CollectiveMismatch
from lockstep.testing import run_ranks

WORLD_SIZES = [2, 3, 5]


def ones(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(numel, dtype=dtype)


def rows(numel: int) -> list[torch.Tensor]:
    return [torch.zeros(numel) for _ in range(dist.get_world_size())]


def scattered(numel: int) -> list[torch.Tensor] | None:
    return rows(numel) if dist.get_rank() == 0 else None


def gathered(numel: int) -> list[torch.Tensor] | None:
    return rows(numel) if dist.get_rank() == 0 else None


@dataclass(frozen=True)
class Case:
    """What most ranks call, what the last one calls, and how errors name the two."""

    usual: Callable[[], Any]
    odd: Callable[[], Any]
    usual_text: str
    odd_text: str


CASES = {
    "operation": Case(
        lambda: dist.all_reduce(ones(4)),
        lambda: dist.broadcast(ones(4), 0),
        "all_reduce(float32[4], SUM)",
        "broadcast(float32[4], root=0)",
    ),
    "shape": Case(
        lambda: dist.all_reduce(ones(1000)),
        lambda: dist.all_reduce(ones(500)),
        "all_reduce(float32[1000], SUM)",
        "all_reduce(float32[500], SUM)",
    ),
    "same numel": Case(
        lambda: dist.all_reduce(ones(12).view(3, 4)),
        lambda: dist.all_reduce(ones(12).view(4, 3)),
        "all_reduce(float32[3, 4], SUM)",
        "all_reduce(float32[4, 3], SUM)",
    ),
    "large against small": Case(
        lambda: dist.all_reduce(ones(3_000_000)),
        lambda: dist.all_reduce(ones(1)),
        "all_reduce(float32[3000000], SUM)",
        "all_reduce(float32[1], SUM)",
    ),
    "large against nothing": Case(
        lambda: dist.all_reduce(ones(100_000)),
        lambda: dist.barrier(),
        "all_reduce(float32[100000], SUM)",
        "barrier()",
    ),
    "dtype": Case(
        lambda: dist.all_reduce(ones(4, torch.float32)),
        lambda: dist.all_reduce(ones(4, torch.float64)),
        "all_reduce(float32[4], SUM)",
        "all_reduce(float64[4], SUM)",
    ),
    "dtype of equal size": Case(
        lambda: dist.all_reduce(ones(4, torch.float32)),
        lambda: dist.all_reduce(ones(4, torch.int32)),
        "all_reduce(float32[4], SUM)",
        "all_reduce(int32[4], SUM)",
    ),
    "reduce op": Case(
        lambda: dist.all_reduce(ones(4), dist.ReduceOp.SUM),
        lambda: dist.all_reduce(ones(4), dist.ReduceOp.MAX),
        "all_reduce(float32[4], SUM)",
        "all_reduce(float32[4], MAX)",
    ),
    "root of broadcast": Case(
        lambda: dist.broadcast(ones(4), 0),
        lambda: dist.broadcast(ones(4), 1),
        "broadcast(float32[4], root=0)",
        "broadcast(float32[4], root=1)",
    ),
    "smaller root of broadcast": Case(
        lambda: dist.broadcast(ones(4), dist.get_world_size() - 1),
        lambda: dist.broadcast(ones(2), dist.get_world_size() - 1),
        "broadcast(float32[4], root=",
        "broadcast(float32[2], root=",
    ),
    "root of reduce": Case(
        lambda: dist.reduce(ones(4), 0),
        lambda: dist.reduce(ones(4), 1),
        "reduce(float32[4], SUM, root=0)",
        "reduce(float32[4], SUM, root=1)",
    ),
    "all_gather": Case(
        lambda: dist.all_gather(rows(3), ones(3)),
        lambda: dist.all_gather(rows(5), ones(5)),
        "all_gather(float32[3])",
        "all_gather(float32[5])",
    ),
    "gather": Case(
        lambda: dist.gather(ones(3), gathered(3)),
        lambda: dist.gather(ones(4), None, 0),
        "gather(float32[3], root=0)",
        "gather(float32[4], root=0)",
    ),
    "scatter": Case(
        lambda: dist.scatter(ones(3), scattered(3)),
        lambda: dist.scatter(ones(2), None, 0),
        "scatter(float32[3], root=0)",
        "scatter(float32[2], root=0)",
    ),
    "reduce_scatter": Case(
        lambda: dist.reduce_scatter(ones(3), rows(3)),
        lambda: dist.reduce_scatter(ones(2), rows(2)),
        "reduce_scatter(float32[3], SUM)",
        "reduce_scatter(float32[2], SUM)",
    ),
    "objects": Case(
        lambda: dist.all_gather_object([None] * dist.get_world_size(), "text"),
        lambda: dist.broadcast_object_list(["text"], 1),
        "all_gather(int64[1])",
        "broadcast(int64[1], root=1)",
    ),
    "symmetric memory": Case(
        lambda: dist.all_reduce(symmetric_empty(8)),
        lambda: dist.all_reduce(symmetric_empty(8)[:4]),
        "all_reduce(float32[8], SUM, symmetric memory at 0)",
        "all_reduce(float32[4], SUM, symmetric memory at 0)",
    ),
    "symmetric against ordinary memory": Case(
        lambda: dist.all_reduce(symmetric_empty(8)),
        lambda: (symmetric_empty(8), dist.all_reduce(ones(8))),
        "all_reduce(float32[8], SUM, symmetric memory at 0)",
        "all_reduce(float32[8], SUM)",
    ),
    "size of symmetric memory": Case(
        lambda: symmetric_empty(8),
        lambda: symmetric_empty(9),
        "symmetric_empty(32 bytes)",
        "symmetric_empty(36 bytes)",
    ),
}


def disagree() -> dict[str, tuple[Caught, bool]]:
    """Every case in one group: how the call ended, and whether the group worked after it."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    return {name: (attempt(case.odd if odd else case.usual), group_works()) for name, case in CASES.items()}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_rank_hears_of_a_mismatch_and_the_group_goes_on(world_size: int) -> None:
    outcomes = run_ranks(disagree, world_size)
    # With two ranks nobody knows which of them is wrong.
    culprits = () if world_size == 2 else (world_size - 1,)
    for name, case in CASES.items():
        pids = {rank: outcome[name][0].pid for rank, outcome in enumerate(outcomes)}
        for outcome in outcomes:
            caught, works_after = outcome[name]
            expect(caught, CollectiveMismatch, culprits, case.usual_text, case.odd_text)
            expect(caught, CollectiveMismatch, culprits, line_of(case.usual), line_of(case.odd))
            assert ranks_named(caught.error) == pids
            assert works_after, name


def differ_in_ones() -> None:
    """What torch takes for the same: shapes that differ in dimensions of size 1 alone."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def value(*sizes: int) -> torch.Tensor:
        return torch.full((1, *sizes) if rank == 0 else sizes, rank + 1.0)

    total = world_size * (world_size + 1) / 2
    for sizes in ((), (5,), (1, 5), (2, 5)):
        reduced, sent, scattered = value(*sizes), value(*sizes), value(*sizes)
        dist.all_reduce(reduced)
        dist.broadcast(sent, 0)
        dist.scatter(scattered, [reduced] * world_size if rank == 0 else None)
        row = [torch.empty_like(sent) for _ in range(world_size)]
        dist.all_gather(row, value(*sizes))
        for tensor, expected in (
            (reduced, total),
            (sent, 1.0),
            (scattered, total),
            *zip(row, range(1, 9), strict=False),
        ):
            assert torch.equal(tensor, torch.full_like(tensor, expected)), (sizes, tensor)
    many = [value(size) for size in range(1, 8)]
    group: Any = dist.group.WORLD
    group.engine.broadcast(many, 0, False, None)
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in many)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_shapes_may_differ_in_dimensions_of_size_one(world_size: int) -> None:
    run_ranks(differ_in_ones, world_size)


def meet_in_other_shapes() -> list[Caught]:
    """A transpose, a tensor with an element less, and two tensors of which the last rank takes the other one first."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    pair = [torch.ones(2, 3), ones(6)]
    caught = [
        attempt(lambda: dist.broadcast(torch.ones(3, 2) if odd else torch.ones(2, 3), 0)),
        attempt(lambda: dist.broadcast(ones(5) if odd else torch.ones(2, 3), 0)),
        *(attempt(lambda tensor=tensor: dist.all_reduce(tensor)) for tensor in (reversed(pair) if odd else pair)),
    ]
    assert group_works()
    return caught


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_shapes_that_may_not_meet(world_size: int) -> None:
    culprits = () if world_size == 2 else (world_size - 1,)
    for transposed, shorter, first, second in run_ranks(meet_in_other_shapes, world_size):
        expect(transposed, CollectiveMismatch, culprits, "broadcast(float32[2, 3], root=0)", "float32[3, 2]")
        expect(shorter, CollectiveMismatch, culprits, "broadcast(float32[2, 3], root=0)", "float32[5]")
        assert first.error is None
        texts = ("all_reduce(float32[6], SUM)", "all_reduce(float32[2, 3], SUM)", "mixes unrelated tensors")
        expect(second, CollectiveMismatch, culprits, *texts)


def meet_in_a_branch() -> tuple[float, list[str]]:
    """Rank 0 takes a branch of its own, to another tensor of as many elements; before, all come from one line."""
    is_first = dist.get_rank() == 0
    with warnings_of_lockstep() as told:
        dist.all_reduce(ones(6) if is_first else torch.ones(2, 3))
        if is_first:
            dist.broadcast(torch.ones(2, 3), 0)
        else:
            dist.broadcast(ones(6), 0)
        assert not told
        if is_first:
            dist.all_reduce(total := ones(6))
        else:
            dist.all_reduce(total := torch.ones(2, 3))
    return total.sum().item(), told


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_tensors_that_may_be_different_ones_are_warned_of(world_size: int) -> None:
    flat, matrix = "all_reduce(float32[6], SUM)", "all_reduce(float32[2, 3], SUM)"
    for rank, (total, told) in enumerate(run_ranks(meet_in_a_branch, world_size)):
        own, other = (flat, matrix) if rank == 0 else (matrix, flat)
        assert total == 6.0 * world_size
        (text,) = told
        assert text.startswith(f"{own} of the default group at ")
        assert f"another rank called {other} at {__file__}:" in text


def call_in_swapped_order() -> list[Caught]:
    calls = [
        lambda: dist.all_reduce(ones(4), dist.ReduceOp.SUM),
        lambda: dist.all_reduce(ones(4), dist.ReduceOp.MAX),
    ]
    if dist.get_rank() == 1:
        calls.reverse()
    caught = [attempt(call) for call in calls]
    assert group_works()
    return caught


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_swapped_calls_of_one_shape(world_size: int) -> None:
    culprits = () if world_size == 2 else (1,)
    for first, second in run_ranks(call_in_swapped_order, world_size):
        for caught in (first, second):
            expect(caught, CollectiveMismatch, culprits, "all_reduce(float32[4], SUM)", "all_reduce(float32[4], MAX)")


def send_uneven_parts() -> Caught:
    """Rank 0 sends two rows to each; the last rank expects one from each."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows_each = 1 if rank == world_size - 1 else 2
    output = torch.zeros(rows_each * world_size, 3)
    caught = attempt(lambda: dist.all_to_all_single(output, torch.ones(2 * world_size, 3)))
    assert group_works()
    return caught


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_pair_of_all_to_all_disagrees(world_size: int) -> None:
    last = world_size - 1
    for caught in run_ranks(send_uneven_parts, world_size):
        expect(caught, CollectiveMismatch, (0, last), "sends 6 elements", "has room for 3")


def disagree_before_large_slots_exist() -> Caught:
    """The last rank's call needs slots that are only made in it; the others' call does not."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    caught = attempt(lambda: dist.all_reduce(ones(100_000 if odd else 4)))
    assert group_works()
    return caught


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_mismatch_in_the_first_large_call(world_size: int) -> None:
    culprits = () if world_size == 2 else (world_size - 1,)
    for caught in run_ranks(disagree_before_large_slots_exist, world_size):
        expect(caught, CollectiveMismatch, culprits, "float32[4]", "float32[100000]")


def each_its_own() -> Caught:
    caught = attempt(lambda: dist.all_reduce(ones(dist.get_rank() + 1)))
    assert group_works()
    return caught


def test_no_two_ranks_agree() -> None:
    for caught in run_ranks(each_its_own, 3):
        expect(caught, CollectiveMismatch, (), "[1]", "[2]", "[3]")


def mismatch_after_many_calls() -> list[bool]:
    """Texts of calls and lines share rings of fixed length; an error must still quote the right ones."""
    right = []
    for numel in range(1, 150):
        own = numel if dist.get_rank() == 0 else numel + 1000
        message = str(attempt(lambda own=own: dist.all_reduce(ones(own))).error)
        right.append(f"float32[{numel}]" in message and f"float32[{numel + 1000}]" in message)
    return right


def test_texts_are_right_when_their_rings_wrap() -> None:
    for right in run_ranks(mismatch_after_many_calls, 2):
        assert all(right)


def save_alone(folder: str) -> Caught:
    """A branch of rank 0 around what is for all ranks."""
    return attempt(lambda: checkpoint.save(folder, {}, step=1) if dist.get_rank() == 0 else dist.barrier())


def synchronize_alone() -> Caught:
    metric = metrics.Mean()
    metric.update(1.0)
    return attempt(lambda: metrics.synchronize(metric) if dist.get_rank() == 0 else dist.barrier())


def mean_against_sum() -> list[Caught]:
    """Both are one all_reduce of the same shape. Ranks may call one function from lines of their own."""
    loss, is_odd = torch.tensor(1.0), dist.get_rank() == 1

    def mean_from_another_line() -> torch.Tensor:
        return lockstep.mean(loss, 2)

    alike = mean_from_another_line if is_odd else lambda: lockstep.mean(loss, 2)
    different = (lambda: lockstep.sum(loss)) if is_odd else lambda: lockstep.mean(loss, 2)
    return [attempt(call) for call in (alike, different, alike)]


def test_functions_of_ours_that_send_the_same_are_told_apart() -> None:
    for before, caught, after in run_ranks(mean_against_sum, 3):
        assert before.error is after.error is None
        expect(
            caught, CollectiveMismatch, (1,), "lockstep.mean (in its all_reduce(", "lockstep.sum (in its all_reduce("
        )
        assert "evaluation=True" not in str(caught.error), "no advice to take one of them out of a loop"


def save_another_step(folder: str) -> Caught:
    return attempt(lambda: checkpoint.save(folder, {}, step=7 + dist.get_rank() % 2))


def test_ranks_that_save_another_step_say_so(tmp_path: Path) -> None:
    first, second, third = run_ranks(save_another_step, 3, str(tmp_path))
    assert first.error is third.error is None
    expect(second, CollectiveMismatch, (1,), "rank 1 saves step 8, but rank 0 has written step 7")


def save_to_a_folder_of_its_own(folder: str) -> list[str]:
    with warnings_of_lockstep() as told:
        checkpoint.save(Path(folder, str(dist.get_rank())), {}, step=1)
    return told


def test_folder_that_is_not_rank_zeros_is_warned_of(tmp_path: Path) -> None:
    first, (warning,) = run_ranks(save_to_a_folder_of_its_own, 2, str(tmp_path))
    assert first == []
    assert f"rank 1 passed the folder {tmp_path}/1, but rank 0, which alone writes, {tmp_path}/0" in warning


def normalize_alone() -> Caught:
    """Rank 0 looks at a batch without model.eval()."""
    norm, values = lockstep.SyncBatchNorm(3), torch.ones(2, 3)
    caught = attempt(lambda: norm(values) if dist.get_rank() == 0 else dist.barrier())
    assert "SyncBatchNorm (in its all_gather(" in str(caught.error)
    return caught


def mean_in_an_evaluation() -> Caught:
    """Three samples in batches of two: rank 0 gets a batch more than rank 1."""
    loader = lockstep.DataLoader(torch.zeros(3), 2, evaluation=True)

    def evaluate() -> None:
        for x in loader:
            lockstep.mean(x.sum(), len(x))
        dist.barrier()

    return attempt(evaluate)


def test_loop_over_an_evaluation_loader_is_told_of() -> None:
    for outcome in run_ranks(mean_in_an_evaluation, 2):
        assert type(outcome.error) is CollectiveMismatch
        assert "or a loop that some leave earlier. All ranks must call lockstep.mean, but a loader" in str(
            outcome.error
        )


def test_layer_that_needs_all_ranks_is_named() -> None:
    for outcome in run_ranks(normalize_alone, 2):
        assert type(outcome.error) is CollectiveMismatch
        assert "All ranks must run SyncBatchNorm in training mode: call model.eval() before" in str(outcome.error)


@pytest.mark.parametrize(
    ("function", "name", "advice"),
    [
        (save_alone, "checkpoint.save (in its all_reduce(int32[], MAX)) at ", "though only rank 0 writes"),
        (synchronize_alone, "metrics.synchronize (in its all_reduce(float64[", "and each gets the values"),
    ],
)
def test_functions_for_all_ranks_are_called_what_users_call_them(
    tmp_path: Path, function: Callable[..., Caught], name: str, advice: str
) -> None:
    args = (str(tmp_path),) if function is save_alone else ()
    for outcome in run_ranks(function, 2, *args):
        assert type(outcome.error) is CollectiveMismatch
        assert name in str(outcome.error)
        advised = f"All ranks must call {name.partition(' ')[0]}, {advice}: call it outside of the branch"
        assert advised in str(outcome.error)


def pass_over_other_batches() -> list[str]:
    """The same, for ranks that leave out a step each, but not the same one."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(40, 3))
    with warnings_of_lockstep() as messages, lockstep.init(seed=0) as world:
        model = lockstep.DistributedDataParallel(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(number: int, x: torch.Tensor) -> None:
            if number == 2 + world.rank:
                raise OSError("unreadable")
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for number, (x,) in enumerate(lockstep.DataLoader(data, batch_size=8)):
            attempt(functools.partial(step, number, x))
    return list(messages)


def test_gradients_of_other_batches_that_a_script_passes_over_are_reported() -> None:
    first, second = run_ranks(pass_over_other_batches, 2, init=False)
    assert second == []
    (message,) = first
    assert message.startswith("1 call(s) of the default group failed")
    assert "the ranks averaged gradients of different batches" in message


def pass_over_errors(ending: str) -> list[str]:
    """What is logged by a script that catches every error of a step and continues."""
    with warnings_of_lockstep() as messages, attempting_all(ending), lockstep.init():
        for step in range(4):
            uneven = ending != "well" and step == 2 and dist.get_rank() == 1
            attempt(lambda uneven=uneven: dist.all_reduce(ones(5 if uneven else 4)))
        if ending == "error":
            raise KeyError("the script's own")
    return list(messages)


def attempting_all(ending: str) -> AbstractContextManager[None]:
    return contextlib.suppress(KeyError) if ending == "error" else contextlib.nullcontext()


@pytest.mark.parametrize("ending", ["well", "passed over", "error"])
def test_errors_that_a_script_passes_over_are_reported_at_the_end(ending: str) -> None:
    first, second = run_ranks(pass_over_errors, 2, ending, init=False)
    assert second == []
    if ending == "passed over":
        (message,) = first
        assert message.startswith("1 call(s) of the default group failed, and the script caught the errors")
        assert "all_reduce(float32[5], SUM)" in message
    else:
        assert first == []
