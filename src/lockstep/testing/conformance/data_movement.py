"""broadcast, all_gather, gather, scatter and all_to_all, in every variant: bytes move, none change."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from lockstep.testing.conformance.case import (
    ALL_DTYPES,
    LARGE_NUMEL,
    Case,
    Context,
    Shape,
    case,
    coalescing,
    expect_equal,
    finish,
    inputs_of,
    spread_out,
)

__all__ = [
    "CASES",
    "check_all_gather",
    "check_all_gather_coalesced",
    "check_all_gather_into_tensor",
    "check_all_gather_into_tensor_in_place",
    "check_all_gather_into_tensor_old_name",
    "check_all_gather_object",
    "check_all_gather_strided",
    "check_all_to_all",
    "check_all_to_all_single",
    "check_all_to_all_single_uneven",
    "check_all_to_all_uneven",
    "check_broadcast",
    "check_broadcast_object_list",
    "check_broadcast_strided",
    "check_coalescing_manager_all_gather",
    "check_flat_meets_shaped",
    "check_gather",
    "check_gather_object",
    "check_gather_single",
    "check_scatter",
    "check_scatter_object_list",
]

_SHAPES: tuple[Shape, ...] = ((), (0,), (1,), (3, 5, 7), (1023,), (LARGE_NUMEL,))

# torch 2.13 renamed the variant for tensors.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def _object_of(rank: int) -> dict[str, Any]:
    """An object whose pickled length differs between ranks."""
    return {"rank": rank, "text": "x" * (10 * rank), "values": list(range(rank))}


def _expect_same(actual: object, expected: object, what: str) -> None:
    if actual != expected:
        raise AssertionError(f"{what} is {actual!r}, expected {expected!r}")


def check_broadcast(context: Context, dtype: torch.dtype, shape: Shape, async_op: bool = False) -> None:
    """Each rank in turn is the root, and all ranks end with its tensor.

    Expected with root r: x_r with salt r on every rank.
    """
    for root in range(context.world_size):
        tensor = inputs_of(context.rank, shape, dtype, salt=root)
        finish(dist.broadcast(tensor, context.global_rank(root), group=context.group, async_op=async_op), async_op)
        expect_equal(tensor, inputs_of(root, shape, dtype, salt=root), f"the tensor from root {root}")


def check_broadcast_strided(context: Context) -> None:
    """broadcast from and into tensors with gaps between their elements.

    Expected: rank 0's values everywhere.
    """
    tensor = spread_out(inputs_of(context.rank, (4, 6), torch.float32))
    dist.broadcast(tensor, context.global_rank(0), group=context.group)
    expect_equal(tensor, inputs_of(0, (4, 6), torch.float32), "the tensor")


def check_broadcast_object_list(context: Context) -> None:
    """Each rank in turn is the root and sends two objects.

    Expected: the root's two objects on every rank.
    """
    for root in range(context.world_size):
        objects: list[Any] = [_object_of(context.rank), context.rank]
        dist.broadcast_object_list(objects, context.global_rank(root), group=context.group)
        _expect_same(objects, [_object_of(root), root], f"the list from root {root}")


def check_all_gather(context: Context, dtype: torch.dtype, shape: Shape, async_op: bool = False) -> None:
    """The variant with lists: all ranks receive the tensors of all ranks, in rank order.

    Expected: output r is x_r; the input is unchanged.
    """
    mine = inputs_of(context.rank, shape, dtype)
    outputs = [torch.full(shape, 1, dtype=dtype) for _ in range(context.world_size)]
    finish(dist.all_gather(outputs, mine, group=context.group, async_op=async_op), async_op)
    for rank, output in enumerate(outputs):
        expect_equal(output, inputs_of(rank, shape, dtype), f"output {rank}")
    expect_equal(mine, inputs_of(context.rank, shape, dtype), "the input after the call")


def check_all_gather_strided(context: Context) -> None:
    """all_gather from and into tensors with gaps; the outputs are views of one tensor.

    Expected: as in check_all_gather.
    """
    mine = spread_out(inputs_of(context.rank, (4, 6), torch.float32))
    columns = torch.zeros(4, 6, context.world_size)
    outputs = list(columns.unbind(dim=2))
    dist.all_gather(outputs, mine, group=context.group)
    for rank, output in enumerate(outputs):
        expect_equal(output, inputs_of(rank, (4, 6), torch.float32), f"output {rank}")


def check_all_gather_into_tensor(
    context: Context, dtype: torch.dtype, shape: Shape, form: str = "concatenated", async_op: bool = False
) -> None:
    """The variant with one output tensor, in which the inputs are either concatenated or stacked.

    Expected: cat(x_0 … x_{W-1}) or stack(x_0 … x_{W-1}), along dimension 0.
    """
    join = torch.stack if form == "stacked" else torch.cat
    expected = join([inputs_of(rank, shape, dtype) for rank in range(context.world_size)])
    output = torch.full_like(expected, 1)
    mine = inputs_of(context.rank, shape, dtype)
    finish(_all_gather_single(output, mine, group=context.group, async_op=async_op), async_op)
    expect_equal(output, expected, "the output")


def check_all_gather_into_tensor_in_place(context: Context) -> None:
    """The input is this rank's part of the output, as in sharded training.

    Expected: as in check_all_gather_into_tensor.
    """
    shape = (7,)
    output = torch.zeros(7 * context.world_size)
    mine = output[7 * context.rank : 7 * (context.rank + 1)]
    mine.copy_(inputs_of(context.rank, shape, torch.float32))
    _all_gather_single(output, mine, group=context.group)
    expected = torch.cat([inputs_of(rank, shape, torch.float32) for rank in range(context.world_size)])
    expect_equal(output, expected, "the output")


def check_all_gather_into_tensor_old_name(context: Context) -> None:
    """`dist.all_gather_into_tensor` itself, which has another name in later releases of torch.

    Expected: as in check_all_gather_into_tensor.
    """
    output = torch.zeros(4 * context.world_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_into_tensor(output, inputs_of(context.rank, (4,), torch.float32), group=context.group)
    expected = torch.cat([inputs_of(rank, (4,), torch.float32) for rank in range(context.world_size)])
    expect_equal(output, expected, "the output")


def check_all_gather_coalesced(context: Context, async_op: bool) -> None:
    """Several tensors in one call equal one all_gather per tensor.

    Expected: outputs[r][i] is rank r's tensor with salt i.
    """
    shapes: tuple[Shape, ...] = ((4,), (2, 3), (50,))
    mine = [inputs_of(context.rank, shape, torch.float32, salt=salt) for salt, shape in enumerate(shapes)]
    outputs = [[torch.zeros(shape) for shape in shapes] for _ in range(context.world_size)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        finish(dist.all_gather_coalesced(outputs, mine, group=context.group, async_op=async_op), async_op)
    for rank, of_rank in enumerate(outputs):
        for salt, (shape, output) in enumerate(zip(shapes, of_rank, strict=True)):
            expect_equal(output, inputs_of(rank, shape, torch.float32, salt=salt), f"output {salt} of rank {rank}")


def check_coalescing_manager_all_gather(context: Context) -> None:
    """Two all_gather calls collected by torch's coalescing manager.

    Expected: as in check_all_gather_into_tensor, for both.
    """
    mine = [inputs_of(context.rank, (3 + extra,), torch.float32) for extra in range(2)]
    outputs = [torch.zeros((3 + extra) * context.world_size) for extra in range(2)]
    with coalescing(context.process_group) as manager:
        for output, tensor in zip(outputs, mine, strict=True):
            _all_gather_single(output, tensor, group=context.group)
    manager.wait()
    for extra, output in enumerate(outputs):
        expected = [inputs_of(rank, (3 + extra,), torch.float32) for rank in range(context.world_size)]
        expect_equal(output, torch.cat(expected), f"output {extra}")


def check_all_gather_object(context: Context) -> None:
    """Objects of different pickled lengths arrive in rank order.

    Expected: entry r is rank r's object.
    """
    objects: list[Any] = [None] * context.world_size
    dist.all_gather_object(objects, _object_of(context.rank), group=context.group)
    _expect_same(objects, [_object_of(rank) for rank in range(context.world_size)], "the list")


def check_gather(context: Context, dtype: torch.dtype, shape: Shape, async_op: bool = False) -> None:
    """Each rank in turn is the root and receives the tensors of all ranks, in rank order.

    Expected on root r: output s is x_s with salt r.
    """
    for root in range(context.world_size):
        mine = inputs_of(context.rank, shape, dtype, salt=root)
        outputs = None
        if context.rank == root:
            outputs = [torch.full(shape, 1, dtype=dtype) for _ in range(context.world_size)]
        work = dist.gather(mine, outputs, context.global_rank(root), group=context.group, async_op=async_op)
        finish(work, async_op)
        for rank, output in enumerate(outputs or []):
            expect_equal(output, inputs_of(rank, shape, dtype, salt=root), f"root {root}'s output {rank}")


def check_gather_single(context: Context, dtype: torch.dtype, shape: Shape, async_op: bool = False) -> None:
    """Each rank in turn is the root and receives all tensors in one; torch 2.14 and newer.

    Expected on root r: cat(x_0 … x_{W-1}) with salt r, along dimension 0.
    """
    for root in range(context.world_size):
        parts = [inputs_of(rank, shape, dtype, salt=root) for rank in range(context.world_size)]
        output = torch.full_like(torch.cat(parts), 1) if context.rank == root else None
        destination = context.global_rank(root)
        gather_single = dist.gather_single  # type: ignore[attr-defined]  # not in the release that mypy reads
        work = gather_single(parts[context.rank], output, destination, group=context.group, async_op=async_op)
        finish(work, async_op)
        if output is not None:
            expect_equal(output, torch.cat(parts), f"root {root}'s output")


def check_gather_object(context: Context) -> None:
    """Each rank in turn is the root and receives the objects of all ranks.

    Expected on the root: entry r is rank r's object.
    """
    for root in range(context.world_size):
        objects: list[Any] | None = [None] * context.world_size if context.rank == root else None
        dist.gather_object(_object_of(context.rank), objects, context.global_rank(root), group=context.group)
        if objects is not None:
            _expect_same(objects, [_object_of(rank) for rank in range(context.world_size)], f"root {root}'s list")


def check_scatter(context: Context, dtype: torch.dtype, shape: Shape, async_op: bool = False) -> None:
    """Each rank in turn is the root and sends one tensor to each rank.

    Expected on rank s from root r: the s-th tensor of r's list, x_r with salt s.
    """
    for root in range(context.world_size):
        output = torch.full(shape, 1, dtype=dtype)
        inputs = None
        if context.rank == root:
            inputs = [inputs_of(root, shape, dtype, salt=rank) for rank in range(context.world_size)]
        work = dist.scatter(output, inputs, context.global_rank(root), group=context.group, async_op=async_op)
        finish(work, async_op)
        expect_equal(output, inputs_of(root, shape, dtype, salt=context.rank), f"the output from root {root}")


def check_scatter_object_list(context: Context) -> None:
    """Each rank in turn is the root and sends one object to each rank.

    Expected on rank s: the s-th object of the root's list.
    """
    for root in range(context.world_size):
        received: list[Any] = [None]
        objects = [_object_of(root + rank) for rank in range(context.world_size)] if context.rank == root else None
        dist.scatter_object_list(received, objects, context.global_rank(root), group=context.group)
        _expect_same(received, [_object_of(root + context.rank)], f"the list from root {root}")


def check_flat_meets_shaped(context: Context, shape: Shape) -> None:
    """Rank 0's tensors have a shape; those of the others are flat, with as many elements.

    Expected: the elements of each collective, as if all tensors were flat; checked twice, because a match may be
    cached.
    """
    numel, world_size = math.prod(shape), context.world_size
    own_shape = shape if context.rank == 0 else (numel,)
    values = [inputs_of(rank, (numel,), torch.float32) for rank in range(world_size)]
    total, root, group = sum(values, torch.zeros(numel)), context.global_rank(0), context.group

    def own() -> torch.Tensor:
        return values[context.rank].clone().view(own_shape)

    for _ in range(2):
        reduced, part, everywhere, sent, scattered = own(), own(), own(), own(), own()
        rows = [torch.zeros(own_shape) for _ in range(world_size)]
        gathered = [torch.zeros(own_shape) for _ in range(world_size)] if context.rank == 0 else None
        dist.broadcast(sent, root, group=group)
        dist.all_reduce(everywhere, group=group)
        dist.reduce(reduced, root, group=group)
        dist.reduce_scatter(part, [own() for _ in range(world_size)], group=group)
        dist.all_gather(rows, own(), group=group)
        dist.gather(own(), gathered, root, group=group)
        dist.scatter(scattered, [own()] * world_size if context.rank == 0 else None, root, group=group)
        expect_equal(sent.view(-1), values[0], "what was broadcast")
        expect_equal(scattered.view(-1), values[0], "what was scattered")
        for name, tensor in (("all_reduce", everywhere), ("reduce_scatter", part), ("reduce", reduced)):
            if name != "reduce" or context.rank == 0:
                expect_equal(tensor.view(-1), total, f"the sum of {name}")
        for rank, value in enumerate(values):
            for row in (rows, gathered or rows):
                expect_equal(row[rank].view(-1), value, f"the row of rank {rank}")


def check_all_to_all(context: Context, dtype: torch.dtype, shape: Shape, async_op: bool = False) -> None:
    """The variant with lists: rank r's s-th tensor goes to rank s.

    Expected on rank r: output s is x_s with salt r.
    """
    ranks = range(context.world_size)
    inputs = [inputs_of(context.rank, shape, dtype, salt=receiver) for receiver in ranks]
    outputs = [torch.full(shape, 1, dtype=dtype) for _ in ranks]
    finish(dist.all_to_all(outputs, inputs, group=context.group, async_op=async_op), async_op)
    for sender, output in enumerate(outputs):
        expect_equal(output, inputs_of(sender, shape, dtype, salt=context.rank), f"output {sender}")


def check_all_to_all_uneven(context: Context) -> None:
    """The variant with lists of tensors of different lengths, some empty.

    Expected on rank r: output s has 2·((r + s) mod 3) elements, x_s with salt r.
    """
    ranks = range(context.world_size)
    inputs = [inputs_of(context.rank, _uneven(context.rank, to), torch.float32, salt=to) for to in ranks]
    outputs = [torch.zeros(_uneven(sender, context.rank)) for sender in ranks]
    dist.all_to_all(outputs, inputs, group=context.group)
    for sender, output in enumerate(outputs):
        expected = inputs_of(sender, _uneven(sender, context.rank), torch.float32, salt=context.rank)
        expect_equal(output, expected, f"output {sender}")


def _uneven(sender: int, receiver: int) -> Shape:
    return (2 * ((sender + receiver) % 3),)


def check_all_to_all_single(context: Context, dtype: torch.dtype, shape: Shape, async_op: bool = False) -> None:
    """The variant with single tensors and even splits: split along dimension 0, one part for each rank.

    Expected on rank r: cat over s of x_s with salt r.
    """
    ranks = range(context.world_size)
    mine = torch.cat([inputs_of(context.rank, shape, dtype, salt=receiver) for receiver in ranks])
    output = torch.full_like(mine, 1)
    finish(dist.all_to_all_single(output, mine, group=context.group, async_op=async_op), async_op)
    expect_equal(output, torch.cat([inputs_of(s, shape, dtype, salt=context.rank) for s in ranks]), "the output")


def check_all_to_all_single_uneven(context: Context, dtype: torch.dtype) -> None:
    """The variant with single tensors and different splits, some empty.

    Expected: as in check_all_to_all_uneven, with the outputs concatenated; rows have 3 columns.
    """
    ranks = range(context.world_size)

    def part(sender: int, receiver: int) -> torch.Tensor:
        return inputs_of(sender, (*_uneven(sender, receiver), 3), dtype, salt=receiver)

    mine = torch.cat([part(context.rank, receiver) for receiver in ranks])
    expected = torch.cat([part(sender, context.rank) for sender in ranks])
    output = torch.full_like(expected, 1)
    dist.all_to_all_single(
        output,
        mine,
        output_split_sizes=[_uneven(sender, context.rank)[0] for sender in ranks],
        input_split_sizes=[_uneven(context.rank, receiver)[0] for receiver in ranks],
        group=context.group,
    )
    expect_equal(output, expected, "the output")


def _cases() -> Iterator[Case]:
    with_tensors = (check_broadcast, check_all_gather, check_gather, check_scatter, check_all_to_all)
    tensor_forms: tuple[Callable[..., None], ...] = (check_all_gather_into_tensor, check_all_to_all_single)
    if hasattr(dist, "gather_single"):
        tensor_forms += (check_gather_single,)
    for check in (*with_tensors, *tensor_forms):
        for dtype in ALL_DTYPES:
            yield case(check, dtype=dtype, shape=(13,))
        for shape in _SHAPES:
            # A 0-dim tensor cannot be split or concatenated along dimension 0.
            if shape or check in with_tensors:
                yield case(check, dtype=torch.float32, shape=shape)
        yield case(check, dtype=torch.float64, shape=(33,), async_op=True)
    for shape in ((), (2, 3)):
        yield case(check_all_gather_into_tensor, dtype=torch.float32, shape=shape, form="stacked")
    yield case(check_all_gather_into_tensor_in_place, "all_gather_into_tensor")
    yield case(check_all_gather_into_tensor_old_name, "all_gather_into_tensor")
    yield case(check_broadcast_strided, "gaps_in_memory", "broadcast")
    yield case(check_all_gather_strided, "gaps_in_memory", "all_gather")
    for async_op in (False, True):
        yield case(check_all_gather_coalesced, async_op=async_op)
    yield case(check_coalescing_manager_all_gather, "coalescing_manager", "all_gather_into_tensor")
    yield case(check_all_gather_object)
    yield case(check_gather_object, "gather")
    yield case(check_broadcast_object_list, "broadcast")
    yield case(check_scatter_object_list, "scatter")
    for shape in ((2, 3), (LARGE_NUMEL, 2)):
        yield case(check_flat_meets_shaped, shape=shape)
    yield case(check_all_to_all_uneven, "all_to_all")
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        yield case(check_all_to_all_single_uneven, "all_to_all_single", dtype=dtype)


CASES: tuple[Case, ...] = tuple(_cases())
