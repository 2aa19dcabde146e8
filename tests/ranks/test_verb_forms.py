"""Every verb in every shape, layout and way of waiting; the operations and their models are those of the soak."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from failing import group_works
from lockstep.errors import CollectiveMismatch, InputError, InputTypeError
from lockstep.testing import run_ranks
from random_programs.messages import Batch, Messages
from random_programs.operations import (
    COLLECTIVES,
    AllReduce,
    Objects,
    Operation,
    Place,
    ReduceScatterTensor,
)

SHAPES = [(), (0,), (1,), (5,), (2, 0, 3), (4, 6), (40_001,)]
LAYOUTS = ["plain", "gaps", "transposed", "slice"]
VERBS = [verb for verb in dict.fromkeys(COLLECTIVES) if verb is not Objects]


def here(group: dist.ProcessGroup | None = None) -> Place:
    members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))  # torch 2.6 takes no None
    return Place(members.index(dist.get_rank()), members, group)


def operation_with(verb: type[Operation], salt: int, shape: tuple[int, ...], layout: str) -> Operation:
    """An operation of float32 or int16 tensors in a given form."""
    operation = verb(Random(salt), dist.get_world_size(), salt)
    operation.dtype, operation.op = (torch.float32, "SUM") if salt % 2 else (torch.int16, "MAX")
    operation.shape, operation.layout = shape, layout
    return operation


def forms(verb: type[Operation]) -> Iterator[Operation]:
    for salt, (shape, layout) in enumerate(itertools.product(SHAPES, LAYOUTS), start=1):
        if len(shape) in verb.dims:
            yield operation_with(verb, salt, shape, layout)


# ---- shapes, layouts, handles ---------------------------------------------------------------------------------------


def flat_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in flat_tensors(part)]


def check_handle(work: Any, written: list[torch.Tensor]) -> None:
    """wait, is_completed and get_future, before and after; the future's value is the memory that was written."""
    early = work.get_future()
    seen: list[Any] = []
    chained = early.then(lambda future: seen.append(future.value()) or len(seen))
    assert work.wait() is not False
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    early.wait()
    assert chained.wait() == 1
    late = work.get_future()
    assert late.done()
    places = {tensor.data_ptr() for tensor in flat_tensors(late.value())}
    assert places >= {tensor.data_ptr() for tensor in written if tensor.is_contiguous() and tensor.numel()}
    assert {tensor.data_ptr() for tensor in flat_tensors(seen[0])} == places


def try_every_form() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    place = here()
    for verb in VERBS:
        for operation in forms(verb):
            for is_async in (False, True):
                started = operation.start(place, is_async)
                if is_async:
                    whole = verb.__name__.endswith(("Tensor", "Single"))  # results are pieces of what was written
                    check_handle(started.work, [] if whole else started.results)
                try:
                    operation.check(place.rank, started.results)
                except AssertionError as error:
                    raise AssertionError(f"{operation}, is_async={is_async}: {error}") from None
    assert group_works()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_form(world_size: int) -> None:
    run_ranks(try_every_form, world_size)


def try_messages() -> None:
    for verb in (Messages, Batch):
        for salt, layout in enumerate(LAYOUTS, start=1):
            operation = operation_with(verb, salt, (), layout)
            started = operation.start(here(), True)
            started.work.wait()
            operation.check(dist.get_rank(), started.results)
    following = (dist.get_rank() + 1) % dist.get_world_size()
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.complex64, torch.bool):
        # One element with a gap behind it is contiguous to torch, and still has the stride of the gap.
        for sent in (torch.zeros(3, dtype=dtype), torch.zeros(2, dtype=dtype)[::2], torch.zeros((), dtype=dtype)):
            sending = dist.isend(sent, following, tag=7)
            received = torch.ones(2).to(dtype)[::2] if sent.numel() == 1 else torch.ones(3).to(dtype)
            receiving = dist.irecv(received, tag=7)
            check_handle(receiving, [received])
            check_handle(sending, [sent])
            assert not received.to(torch.complex64).count_nonzero()


def test_messages() -> None:
    run_ranks(try_messages, 3)


# ---- overlapping groups, a thread for each --------------------------------------------------------------------------


def use_groups_in_threads(num_rounds: int) -> bool:
    """Rank 1 of four is in three groups; every verb runs in all of them at a time."""
    warnings.simplefilter("ignore", FutureWarning)
    groups = [dist.new_group(members) for members in ([0, 1], [1, 2, 3], [0, 1, 2, 3])]
    own = [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
    errors: list[BaseException] = []

    def run(group: dist.ProcessGroup) -> None:
        place = here(group)
        try:
            for salt in range(1, num_rounds):
                for verb in VERBS:
                    operation = verb(Random(f"{salt} {place.members}"), len(place.members), salt)
                    started = operation.start(place, salt % 2 == 0)
                    if started.work is not None:
                        started.work.wait()
                    operation.check(place.rank, started.results)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(group,)) for group in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for error in errors:
        raise error
    return group_works()


def test_overlapping_groups_in_threads() -> None:
    assert run_ranks(use_groups_in_threads, 4, 8) == [True] * 4


# ---- first dimensions that differ between ranks ---------------------------------------------------------------------


def gather_unevenly() -> tuple[str, str]:
    warnings.simplefilter("ignore", FutureWarning)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((rank + 1, 2), float(rank))
    outputs = [torch.empty(peer + 1, 2) for peer in range(world_size)]
    work = dist.all_gather(outputs, mine, async_op=True)
    assert work is not None
    work.wait()
    assert torch.equal(
        torch.cat(outputs), torch.arange(3.0).repeat_interleave(torch.arange(1, 4))[:, None].expand(6, 2)
    )
    whole = torch.empty(6, 2)
    with pytest.raises(InputError) as of_tensor:
        dist.all_gather_into_tensor(whole, mine[:1] if rank == 1 else mine)
    with pytest.raises(CollectiveMismatch) as of_list:
        dist.all_gather([torch.empty_like(mine) for _ in range(world_size)], mine)
    assert group_works()
    return str(of_tensor.value), str(of_list.value)


def test_all_gather_of_different_sizes() -> None:
    for of_tensor, of_list in run_ranks(gather_unevenly, 3):
        assert "Where sizes differ between ranks, call dist.all_gather, which takes a list with a tensor" in of_tensor
        assert all(f"rank {rank} (" in of_list for rank in range(3))
        assert all(f"float32[{rows}, 2]" in of_list for rows in (1, 2, 3))


# ---- reduce operations ----------------------------------------------------------------------------------------------


def multiply_first() -> None:
    """PREMUL_SUM, with a number and with a tensor; torch makes it by a name of NCCL's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = world_size * (world_size + 1) / 2
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for factor in (0.5, torch.tensor([0.5], dtype=dtype)):
            op = dist._make_nccl_premul_sum(factor)
            dist.all_reduce(tensor := torch.full((9,), rank + 1.0, dtype=dtype), op)
            assert torch.equal(tensor, torch.full((9,), total / 2, dtype=dtype))
            source = [torch.full((9,), rank + 1.0, dtype=dtype) for _ in range(world_size)]
            dist.reduce_scatter(tensor, source, op)
            assert torch.equal(tensor, torch.full((9,), total / 2, dtype=dtype))
    with pytest.raises(InputTypeError, match="PREMUL_SUM of int32 tensors: it needs numbers that can be divided"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), dist._make_nccl_premul_sum(0.5))
    assert group_works()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_multiply_first(world_size: int) -> None:
    run_ranks(multiply_first, world_size)


def multiply_what_does_not_match(odd: int) -> None:
    """The tensor of a call that does not match keeps its values, so that the call can be made again."""
    op = dist._make_nccl_premul_sum(0.5)
    world_size = dist.get_world_size()
    for numel in (9, 400_000):  # of small slots, and of large ones
        for tensor in (torch.ones(numel), lockstep.symmetric_empty(numel).fill_(1.0)):
            with pytest.raises(CollectiveMismatch):
                dist.all_reduce(tensor[: numel - 1] if dist.get_rank() == odd else tensor, op)
            assert tensor.eq(1.0).all()
            dist.all_reduce(tensor, op)
            assert tensor.eq(world_size / 2).all()
    assert group_works()


@pytest.mark.parametrize("world_size", [2, 3])
def test_multiplying_what_does_not_match(world_size: int) -> None:
    run_ranks(multiply_what_does_not_match, world_size, 1)


# ---- several in one call --------------------------------------------------------------------------------------------


def coalesce() -> None:
    """torch's coalescing manager with several tensors of different kinds, and DDP's way to broadcast its parameters."""
    warnings.simplefilter("ignore", FutureWarning)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = here()
    for verb in (AllReduce, ReduceScatterTensor):
        operations = [operation_with(verb, 2 * salt + 1, (salt, 3), "plain") for salt in range(1, 6)]
        with dist._coalescing_manager(async_ops=True) as manager:
            started = [operation.start(place, False) for operation in operations]
        manager.wait()
        for operation, one in zip(operations, started, strict=True):
            operation.check(place.rank, one.results)
    tensors = [torch.full((size,), float(rank)) for size in (3, 70_000, 0, 5)]
    dist._broadcast_coalesced(dist.group.WORLD, tensors, 1024, world_size - 1)
    assert all(bool((tensor == world_size - 1).all()) for tensor in tensors)
    assert group_works()


@pytest.mark.parametrize("world_size", [1, 3])
def test_coalesced(world_size: int) -> None:
    run_ranks(coalesce, world_size)
