"""send, recv, isend, irecv, batches of them, and objects between two ranks."""

from __future__ import annotations

from collections.abc import Iterator
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
    expect_equal,
    inputs_of,
    spread_out,
)

__all__ = [
    "CASES",
    "check_batch_isend_irecv",
    "check_isend_irecv_ring",
    "check_object_p2p",
    "check_order_within_a_tag",
    "check_recv_any_source",
    "check_send_recv",
    "check_send_strided",
    "check_tags",
]


def _neighbours(context: Context) -> tuple[int, int]:
    """The next and the previous rank of the ring, as global ranks."""
    following = context.global_rank((context.rank + 1) % context.world_size)
    previous = context.global_rank((context.rank - 1) % context.world_size)
    return following, previous


def check_send_recv(context: Context, dtype: torch.dtype, shape: Shape) -> None:
    """Every ordered pair of ranks exchanges one tensor with blocking calls.

    Expected on rank r from s: x_s with salt r. All ranks go through the pairs in the same order, so that blocking calls
    cannot deadlock.
    """
    for sender in range(context.world_size):
        for receiver in range(context.world_size):
            if sender == receiver:
                continue
            if context.rank == sender:
                tensor = inputs_of(sender, shape, dtype, salt=receiver)
                dist.send(tensor, context.global_rank(receiver), group=context.group)
            elif context.rank == receiver:
                tensor = torch.full(shape, 1, dtype=dtype)
                source = dist.recv(tensor, context.global_rank(sender), group=context.group)
                expect_equal(tensor, inputs_of(sender, shape, dtype, salt=receiver), f"the tensor from {sender}")
                _expect(source == context.global_rank(sender), f"recv returned {source}, the sender was {sender}")


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def check_isend_irecv_ring(context: Context, shape: Shape) -> None:
    """All ranks send to the next rank and receive from the previous one at the same time.

    Expected on rank r: x_{r-1}, even for messages larger than any buffer.
    """
    following, previous = _neighbours(context)
    sent = inputs_of(context.rank, shape, torch.float32)
    received = torch.zeros(shape)
    sending = dist.isend(sent, following, group=context.group)
    receiving = dist.irecv(received, previous, group=context.group)
    assert sending is not None
    assert receiving is not None
    receiving.wait()
    sending.wait()
    expect_equal(received, inputs_of((context.rank - 1) % context.world_size, shape, torch.float32), "the tensor")


def check_tags(context: Context) -> None:
    """Messages are matched by tag rather than by order: they are received in the reverse order of sending.

    Expected: tag t carries salt t.
    """
    following, previous = _neighbours(context)
    tags = range(5)
    sending = [
        dist.isend(inputs_of(context.rank, (6,), torch.float32, salt=tag), following, group=context.group, tag=tag)
        for tag in tags
    ]
    left = (context.rank - 1) % context.world_size
    for tag in reversed(tags):
        received = torch.zeros(6)
        dist.recv(received, previous, group=context.group, tag=tag)
        expect_equal(received, inputs_of(left, (6,), torch.float32, salt=tag), f"the tensor with tag {tag}")
    for work in sending:
        assert work is not None
        work.wait()


def check_order_within_a_tag(context: Context) -> None:
    """Messages between two ranks with the same tag do not overtake each other.

    Expected: the i-th received carries salt i.
    """
    following, previous = _neighbours(context)
    shapes: tuple[Shape, ...] = ((3,), (70000,), (0,), (5,))
    sending = [
        dist.isend(inputs_of(context.rank, shape, torch.float32, salt=salt), following, group=context.group)
        for salt, shape in enumerate(shapes)
    ]
    left = (context.rank - 1) % context.world_size
    for salt, shape in enumerate(shapes):
        received = torch.zeros(shape)
        dist.recv(received, previous, group=context.group)
        expect_equal(received, inputs_of(left, shape, torch.float32, salt=salt), f"message {salt}")
    for work in sending:
        assert work is not None
        work.wait()


def check_recv_any_source(context: Context) -> None:
    """Rank 0 receives from any rank, and learns the sender.

    Expected: one message from each other rank, in any order; the value belongs to the source
    that recv returned.
    """
    if context.rank != 0:
        dist.send(inputs_of(context.rank, (8,), torch.float32), context.global_rank(0), group=context.group, tag=3)
        return
    by_global_rank = {context.global_rank(rank): rank for rank in range(1, context.world_size)}
    while by_global_rank:
        received = torch.zeros(8)
        source = dist.recv(received, group=context.group, tag=3)
        _expect(source in by_global_rank, f"recv returned {source}, expected one of {sorted(by_global_rank)}")
        expect_equal(received, inputs_of(by_global_rank.pop(source), (8,), torch.float32), f"the tensor from {source}")


def check_send_strided(context: Context) -> None:
    """send and recv of tensors with gaps between their elements.

    Expected on rank r: x_{r-1}.
    """
    following, previous = _neighbours(context)
    received = spread_out(torch.zeros(4, 6))
    sending = dist.isend(spread_out(inputs_of(context.rank, (4, 6), torch.float32)), following, group=context.group)
    assert sending is not None
    dist.recv(received, previous, group=context.group)
    sending.wait()
    expect_equal(received, inputs_of((context.rank - 1) % context.world_size, (4, 6), torch.float32), "the tensor")


def check_batch_isend_irecv(context: Context) -> None:
    """A batch in which each rank sends to and receives from all others.

    Expected on rank r from s: x_s with salt r.
    """
    others = [rank for rank in range(context.world_size) if rank != context.rank]
    received = {rank: torch.zeros(11) for rank in others}
    sent = {rank: inputs_of(context.rank, (11,), torch.float32, salt=rank) for rank in others}
    operations = [dist.P2POp(dist.irecv, received[rank], context.global_rank(rank), context.group) for rank in others]
    operations += [dist.P2POp(dist.isend, sent[rank], context.global_rank(rank), context.group) for rank in others]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for rank, tensor in received.items():
        expect_equal(tensor, inputs_of(rank, (11,), torch.float32, salt=context.rank), f"the tensor from {rank}")


def check_object_p2p(context: Context) -> None:
    """Rank 0 sends each other rank a list of objects.

    Expected on rank r: the two objects made for r.
    """

    def objects_for(rank: int) -> list[Any]:
        return [{"to": rank, "padding": "y" * (100 * rank)}, ("pair", rank)]

    if context.rank == 0:
        for rank in range(1, context.world_size):
            dist.send_object_list(objects_for(rank), context.global_rank(rank), group=context.group)
        return
    received: list[Any] = [None, None]
    dist.recv_object_list(received, context.global_rank(0), group=context.group)
    _expect(received == objects_for(context.rank), f"received {received}, expected {objects_for(context.rank)}")


def _cases() -> Iterator[Case]:
    for dtype in ALL_DTYPES:
        yield case(check_send_recv, "p2p", min_world_size=2, dtype=dtype, shape=(5,))
    for shape in ((), (0,), (3, 5), (LARGE_NUMEL,)):
        yield case(check_send_recv, "p2p", min_world_size=2, dtype=torch.float32, shape=shape)
    for shape in ((7,), (LARGE_NUMEL,)):
        yield case(check_isend_irecv_ring, "p2p", min_world_size=2, shape=shape)
    yield case(check_tags, "p2p", min_world_size=2)
    yield case(check_order_within_a_tag, "p2p", min_world_size=2)
    yield case(check_recv_any_source, "p2p", min_world_size=2)
    yield case(check_send_strided, "p2p", "gaps_in_memory", min_world_size=2)
    yield case(check_batch_isend_irecv, "p2p", min_world_size=2)
    yield case(check_object_p2p, "p2p", min_world_size=2)


CASES: tuple[Case, ...] = tuple(_cases())
