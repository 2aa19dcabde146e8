"""Barriers, sub-groups, and guarantees of asynchronous calls."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.testing.conformance import data_movement, reductions
from lockstep.testing.conformance.case import Case, Context, case, expect_equal, finish, inputs_of, reduced
from lockstep.testing.limits import limit_s

__all__ = [
    "CASES",
    "check_barrier",
    "check_groups_interleaved",
    "check_is_completed_without_wait",
    "check_many_outstanding",
    "check_monitored_barrier",
    "check_non_members",
    "check_subgroups",
    "check_sync_after_async",
    "check_work_interface",
]


def check_barrier(context: Context, async_op: bool) -> None:
    """No rank leaves a barrier before all ranks have entered it.

    Expected, in each of 20 rounds: the last entry is before the first exit, on the monotonic clock,
    which all processes of a host share.
    """
    for round_number in range(20):
        entered = time.monotonic()
        work = dist.barrier(group=context.group, async_op=async_op)
        finish(work, async_op)
        left = time.monotonic()
        times = torch.tensor([-entered, left], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MIN, group=context.group)
        last_entry, first_exit = -times[0].item(), times[1].item()
        if first_exit < last_entry:
            raise AssertionError(
                f"in round {round_number} a rank left {last_entry - first_exit:.6f} s before the last one entered"
            )


def check_monitored_barrier(context: Context, wait_all_ranks: bool) -> None:
    """monitored_barrier returns on every rank once all ranks have called it.

    Expected: no exception, three times. torch's own function only accepts gloo; `import lockstep` makes it accept our
    groups.
    """
    for _ in range(3):
        dist.monitored_barrier(context.group, timedelta(seconds=10), wait_all_ranks=wait_all_ranks)


def check_work_interface(context: Context, verb: str) -> None:
    """The interface of the handle of an asynchronous call.

    Expected: wait() returns True or None, then is_completed() is True, the future is done and its continuation sees the
    result: for all_reduce and broadcast the tensor itself.
    """
    tensors = [inputs_of(rank, (64,), torch.float32) for rank in range(context.world_size)]
    tensor = tensors[context.rank].clone()
    work: Any
    if verb == "all_reduce":
        work, expected = dist.all_reduce(tensor, group=context.group, async_op=True), reduced("SUM", tensors)
    else:
        root = context.world_size - 1
        work = dist.broadcast(tensor, context.global_rank(root), group=context.group, async_op=True)
        expected = tensors[root]
    chained = work.get_future().then(_first_of)
    if work.wait() is False:
        raise AssertionError("wait() returned False")
    if not work.is_completed():
        raise AssertionError("is_completed() is false after wait()")
    expect_equal(tensor, expected, "the tensor")
    expect_equal(chained.wait(), expected, "the future's value")


def _first_of(future: torch.futures.Future[Any]) -> torch.Tensor:
    value = future.value()
    while isinstance(value, list | tuple):
        value = value[0]
    assert isinstance(value, torch.Tensor)
    return value.clone()


def check_is_completed_without_wait(context: Context) -> None:
    """An asynchronous call finishes even if nobody waits for it.

    Expected: is_completed() becomes True within 10 s of a quiet machine on every rank.
    """
    work = dist.all_reduce(torch.ones(100), group=context.group, async_op=True)
    assert work is not None
    timeout_s = limit_s(10.0)
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise AssertionError(f"is_completed() is still false after {timeout_s:.0f} s")
        time.sleep(0.0005)
    work.wait()


def check_many_outstanding(context: Context, count: int) -> None:
    """Many calls of different kinds and sizes in flight, waited for in reverse order.

    Expected: call i has the same result as a single call with salt i.
    """
    pending: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for salt in range(count):
        shape = ((7 * salt) % 301,)
        tensors = [inputs_of(rank, shape, torch.float32, salt=salt) for rank in range(context.world_size)]
        tensor = tensors[context.rank].clone()
        root = salt % context.world_size
        if salt % 3 == 2:
            work = dist.broadcast(tensor, context.global_rank(root), group=context.group, async_op=True)
            pending.append((work, tensor, tensors[root]))
        else:
            work = dist.all_reduce(tensor, group=context.group, async_op=True)
            pending.append((work, tensor, reduced("SUM", tensors)))
    for salt in reversed(range(count)):
        work, tensor, expected = pending[salt]
        work.wait()
        expect_equal(tensor, expected, f"the tensor of call {salt}")


def check_sync_after_async(context: Context) -> None:
    """A synchronous call made while asynchronous ones are in flight is executed after them.

    Expected: five all_reduce calls on one tensor multiply its sum by W each time: the last,
    synchronous, result is sum(x) * W**4.
    """
    tensors = [inputs_of(rank, (40000,), torch.float64) for rank in range(context.world_size)]
    tensor = tensors[context.rank].clone()
    works = [dist.all_reduce(tensor, group=context.group, async_op=True) for _ in range(4)]
    dist.all_reduce(tensor, group=context.group)
    expect_equal(tensor, reduced("SUM", tensors) * context.world_size**4, "the tensor")
    for work in works:
        assert work is not None
        work.wait()


# The checks that run inside sub-groups: one for each way of addressing ranks.
_IN_GROUPS: tuple[tuple[Callable[..., None], dict[str, Any]], ...] = (
    (reductions.check_all_reduce, {"op": "SUM", "dtype": torch.float32, "shape": (1023,)}),
    (reductions.check_reduce, {"op": "MAX", "dtype": torch.int64, "shape": (9,)}),
    (data_movement.check_broadcast, {"dtype": torch.float32, "shape": (5,)}),
    (data_movement.check_all_gather, {"dtype": torch.float32, "shape": (5,)}),
    (data_movement.check_all_gather_object, {}),
    (data_movement.check_broadcast_object_list, {}),
)


def _run_in(group: Any, ranks: list[int], global_rank: int) -> None:
    if global_rank in ranks:
        context = Context(ranks.index(global_rank), len(ranks), group)
        for check, arguments in _IN_GROUPS:
            check(context, **arguments)


def check_subgroups(context: Context, layout: str) -> None:
    """Collectives within groups of some of the ranks, created by new_group on all ranks.

    Expected: every check passes within each group, with the group's global ranks as roots. Layouts: "pairs" overlap,
    (0, 1), (1, 2), …; "halves" are disjoint and used at the same time; "alone" has one rank each; "all" has all ranks.
    """
    everybody = list(range(context.world_size))
    layouts = {
        "pairs": [[rank, rank + 1] for rank in everybody[:-1]],
        "halves": [half for half in (everybody[::2], everybody[1::2]) if half],
        "alone": [[rank] for rank in everybody],
        "all": [everybody],
    }
    groups = [(dist.new_group(ranks), ranks) for ranks in layouts[layout]]
    for group, ranks in groups:
        _run_in(group, ranks, context.rank)
    dist.barrier(group=context.group)
    for group, ranks in groups:
        if context.rank in ranks:
            dist.destroy_process_group(group)


def check_non_members(context: Context) -> None:
    """A rank outside a group can call its collectives without effect.

    Expected: the group of all ranks but the last computes its own sum; the last rank gets torch's placeholder for a
    group, its call warns, and its tensor is unchanged.
    """
    members = list(range(context.world_size - 1))
    group = dist.new_group(members)
    tensors = [inputs_of(rank, (6,), torch.float32) for rank in members]
    if context.rank in members:
        tensor = tensors[context.rank].clone()
        dist.all_reduce(tensor, group=group)
        expect_equal(tensor, reduced("SUM", tensors), "a member's tensor")
    else:
        tensor = inputs_of(context.rank, (6,), torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.all_reduce(tensor, group=group)
        expect_equal(tensor, inputs_of(context.rank, (6,), torch.float32), "the outsider's tensor")
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            raise AssertionError(f"new_group returned {group!r} to a rank that is not a member")
    dist.barrier(group=context.group)
    if context.rank in members:
        dist.destroy_process_group(group)


def check_groups_interleaved(context: Context) -> None:
    """Asynchronous calls on the world and on another group of all ranks, waited for in reverse order.

    Expected: the groups do not receive each other's data: call i has salt i.
    """
    second = dist.new_group(list(range(context.world_size)))
    pending: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for salt in range(8):
        tensors = [inputs_of(rank, (500,), torch.float32, salt=salt) for rank in range(context.world_size)]
        tensor = tensors[context.rank].clone()
        group = second if salt % 2 else context.group
        pending.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, reduced("SUM", tensors)))
    for salt in reversed(range(8)):
        work, tensor, expected = pending[salt]
        work.wait()
        expect_equal(tensor, expected, f"the tensor of call {salt}")
    dist.barrier(group=context.group)
    dist.destroy_process_group(second)


def _cases() -> Iterator[Case]:
    for async_op in (False, True):
        yield case(check_barrier, async_op=async_op)
    for wait_all_ranks in (False, True):
        yield case(check_monitored_barrier, wait_all_ranks=wait_all_ranks)
    for verb in ("all_reduce", "broadcast"):
        yield case(check_work_interface, verb=verb)
    yield case(check_is_completed_without_wait)
    yield case(check_many_outstanding, count=60)
    yield case(check_sync_after_async, "in_order")
    for layout in ("alone", "all"):
        yield case(check_subgroups, layout=layout)
    for layout in ("pairs", "halves"):
        yield case(check_subgroups, min_world_size=2, layout=layout)
    yield case(check_non_members, min_world_size=2)
    yield case(check_groups_interleaved)


CASES: tuple[Case, ...] = tuple(_cases())
