"""send, recv and their kin on the lockstep group: every size and order in which messages can come."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from failing import wait_until
from lockstep.shm.pool import CHUNK_BYTES
from lockstep.testing import run_ranks

# Nothing, one byte, a record's worth, around the largest eager message, around one and two chunks, many chunks.
SIZES = [0, 1, 63, 64, 65, 4_097, 16_384, 16_385, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 7, (8 << 20) + 3]
SEED = 5


def message(size: int, rank: int, salt: int = 0) -> torch.Tensor:
    """Bytes that differ between ranks, salts and positions."""
    return (torch.arange(size, dtype=torch.int32) * (2 * rank + 3) + 7 * salt + rank).to(torch.uint8)


def neighbours() -> tuple[int, int]:
    """The next and the previous rank of the ring."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % world_size, (rank - 1) % world_size


def check(received: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert torch.equal(received, expected), what


# ---- sizes and layouts ---------------------------------------------------------------------------------------------


def send_round_the_ring(receive_first: bool, sizes: list[int] = SIZES) -> None:
    following, previous = neighbours()
    for size in sizes:
        sent, received = message(size, dist.get_rank()), torch.full((size,), 99, dtype=torch.uint8)
        if receive_first:
            receiving = dist.irecv(received, previous)
            dist.send(sent, following)
        else:
            sending = dist.isend(sent, following)
            receiving = dist.irecv(received, previous)
            sending.wait()
        receiving.wait()
        check(received, message(size, previous), f"{size} bytes")


@pytest.mark.parametrize("receive_first", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_size(world_size: int, receive_first: bool) -> None:
    run_ranks(send_round_the_ring, world_size, receive_first)


def test_every_size_without_a_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared folder nothing with a name may stay while the group lives: messages go through the rings."""
    monkeypatch.setenv("LOCKSTEP_SHM_DIR", str(tmp_path))
    run_ranks(send_round_the_ring, 2, True, SIZES[:-1])
    assert not list(tmp_path.iterdir())


def send_layouts() -> None:
    following, previous = neighbours()
    base = torch.arange(24.0).view(4, 6)
    layouts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[1:3, 2:5],
        lambda t: t[2, 3],
        lambda t: t[:0],
        lambda t: t.view(2, 2, 6).permute(2, 0, 1),
    ]
    for layout in layouts:
        sent = layout(base + 100 * dist.get_rank())
        target = torch.zeros(4, 6)
        sending = dist.isend(sent, following)
        dist.recv(layout(target), previous)
        sending.wait()
        expected = torch.zeros(4, 6)
        layout(expected).copy_(layout(base + 100 * previous))
        check(target, expected, f"{list(sent.shape)} with strides {sent.stride()}")


def test_layouts() -> None:
    run_ranks(send_layouts, 2)


def send_dtypes() -> None:
    following, previous = neighbours()
    for dtype in (torch.complex64, torch.complex128, torch.bool, torch.float8_e5m2, torch.uint16, torch.bfloat16):
        sent = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
        received = torch.zeros(5).to(dtype)
        sending = dist.isend(sent, following)
        dist.recv(received, previous)
        sending.wait()
        check(received.view(torch.uint8), sent.view(torch.uint8), str(dtype))
    leaf = torch.zeros(3, requires_grad=True)
    sending = dist.isend(torch.ones(3, requires_grad=True), following)
    dist.recv(leaf, previous)
    sending.wait()
    check(leaf.detach(), torch.ones(3), "a leaf of autograd")
    sending = dist.isend(torch.arange(6.0), following)
    dist.recv(shaped := torch.zeros(2, 1, 3), previous)
    sending.wait()
    check(shaped.view(-1), torch.arange(6.0), "a flat tensor received in another shape")


def test_dtypes() -> None:
    run_ranks(send_dtypes, 2)


# ---- matching ------------------------------------------------------------------------------------------------------


def send_tags_in_any_order() -> None:
    """Everybody sends to everybody, tags and sizes shuffled; receives are posted in another order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = {tag: random.Random(SEED + tag).choice([0, 5, 300, 20_000, 700_000]) for tag in range(40)}
    others = [peer for peer in range(world_size) if peer != rank]
    plan = [(peer, tag) for peer in others for tag in sizes]
    shuffled = random.Random(SEED + rank)
    shuffled.shuffle(plan)
    sending = [dist.isend(message(sizes[tag], rank, tag + peer), peer, tag=tag) for peer, tag in plan]
    shuffled.shuffle(plan)
    receiving = []
    for peer, tag in plan:
        received = torch.full((sizes[tag],), 99, dtype=torch.uint8)
        receiving.append((dist.irecv(received, peer, tag=tag), received, peer, tag))
    shuffled.shuffle(receiving)
    for work, received, peer, tag in receiving:
        work.wait()
        check(received, message(sizes[tag], peer, tag + rank), f"tag {tag} from {peer}")
    for work in sending:
        work.wait()


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_tags_in_any_order(world_size: int) -> None:
    run_ranks(send_tags_in_any_order, world_size)


def receive_from_any() -> None:
    """Rank 0 receives what comes, of several sizes; one receive names its source and shares a tag with the others."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = {10: 3, 11: 30_000, 12: 0, 13: 600_000}
    if rank != 0:
        for tag, size in sizes.items():
            dist.send(message(size, rank, tag), 0, tag=tag)
        return
    named = torch.zeros(sizes[10], dtype=torch.uint8)
    assert dist.recv(named, world_size - 1, tag=10) == world_size - 1
    check(named, message(sizes[10], world_size - 1, 10), "the named message")
    for tag, size in sizes.items():
        missing = set(range(1, world_size)) - ({world_size - 1} if tag == 10 else set())
        posted = [torch.zeros(size, dtype=torch.uint8) for _ in missing]
        works = [dist.irecv(received, tag=tag) for received in posted]
        for work, received in zip(works, posted, strict=True):
            work.wait()
            source = work._source_rank()
            check(received, message(size, source, tag), f"tag {tag} of {source}")
            missing.remove(source)


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_source(world_size: int) -> None:
    run_ranks(receive_from_any, world_size)


def receive_in_order_of_posting() -> None:
    """A message goes to the receive that was posted first, whether that names its source or not."""
    if dist.get_rank() == 1:
        dist.barrier()
        for salt in range(4):
            dist.send(message(4, 1, salt), 0)
        return
    posted = [torch.zeros(4, dtype=torch.uint8) for _ in range(4)]
    works = [dist.irecv(received, source) for received, source in zip(posted, (None, 1, 1, None), strict=True)]
    dist.barrier()
    for salt, (work, received) in enumerate(zip(works, posted, strict=True)):
        work.wait()
        check(received, message(4, 1, salt), f"receive {salt}")


def test_order_of_posting() -> None:
    run_ranks(receive_in_order_of_posting, 2)


def send_many_before_any_is_received() -> None:
    """More than a receiver keeps for a sender: the rest is announced only, and still in order."""
    count, size = 4_500, 1_000
    if dist.get_rank() == 0:
        works = [dist.isend(message(size, 0, salt), 1, tag=salt % 3) for salt in range(count)]
        dist.barrier()
        for work in works:
            work.wait()
        return
    dist.barrier()
    for tag in (2, 0, 1):
        for salt in range(tag, count, 3):
            received = torch.zeros(size, dtype=torch.uint8)
            dist.recv(received, 0, tag=tag)
            assert received[1] == message(2, 0, salt)[1], (tag, salt)


def test_many_before_any_is_received() -> None:
    run_ranks(send_many_before_any_is_received, 2)


def send_to_self() -> None:
    rank = dist.get_rank()
    for size in (0, 5, 1_000_000):
        received = torch.zeros(size, dtype=torch.uint8)
        sending = dist.isend(message(size, rank), rank, tag=1)
        assert not sending.is_completed()
        receiving = dist.irecv(received, rank, tag=1)
        receiving.wait()
        sending.wait()
        check(received, message(size, rank), f"{size} bytes")


@pytest.mark.parametrize("world_size", [1, 2])
def test_send_to_self(world_size: int) -> None:
    run_ranks(send_to_self, world_size)


# ---- progress ------------------------------------------------------------------------------------------------------


def send_first_on_both_sides() -> None:
    """Blocking sends of small messages end although nobody has come to a receive."""
    following, previous = neighbours()
    for salt in range(5):
        dist.send(message(1_000, dist.get_rank(), salt), following)
    for salt in range(5):
        dist.recv(received := torch.zeros(1_000, dtype=torch.uint8), previous)
        check(received, message(1_000, previous, salt), f"message {salt}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_send_first_on_both_sides(world_size: int) -> None:
    run_ranks(send_first_on_both_sides, world_size)


def progress_inside_collectives() -> None:
    """Nobody waits for the large send or the early receive: they continue while their rank is in a collective."""
    size = 6 << 20
    if dist.get_rank() == 0:
        sending = dist.isend(message(size, 0), 1)
        dist.all_reduce(torch.ones(3))  # Rank 1 comes to it when it has the message.
        sending.wait()
        receiving = dist.irecv(received := torch.zeros(size, dtype=torch.uint8), 1)
        dist.barrier()
        receiving.wait()
        check(received, message(size, 1), "the message received during a barrier")
    else:
        dist.recv(received := torch.zeros(size, dtype=torch.uint8), 0)
        check(received, message(size, 0), "the message sent during an all_reduce")
        dist.all_reduce(torch.ones(3))
        dist.send(message(size, 1), 0)
        dist.barrier()


def test_progress_inside_collectives() -> None:
    run_ranks(progress_inside_collectives, 2)


def interleave_with_async_collectives() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    following, previous = neighbours()
    pending = []
    for salt in range(20):
        reduced = torch.full((50_000,), float(rank + salt))
        pending.append((dist.all_reduce(reduced, async_op=True), reduced, None))
        received = torch.zeros(90_000, dtype=torch.uint8)
        pending.append((dist.isend(message(90_000, rank, salt), following, tag=salt), None, None))
        pending.append((dist.irecv(received, previous, tag=salt), received, salt))
    for number, (work, tensor, salt) in enumerate(reversed(pending)):
        work.wait()
        if salt is not None:
            check(tensor, message(90_000, previous, salt), f"message {salt}")
        elif tensor is not None:
            expected = world_size * (19 - number // 3) + world_size * (world_size - 1) / 2
            assert torch.all(tensor == expected), number


@pytest.mark.parametrize("world_size", [2, 3])
def test_interleaved_with_async_collectives(world_size: int) -> None:
    run_ranks(interleave_with_async_collectives, world_size)


def use_handles() -> None:
    """is_completed becomes true and futures are done although nobody calls wait."""
    rank = dist.get_rank()
    for size in (10, 2_000_000):
        received = torch.zeros(size, dtype=torch.uint8)
        if rank == 0:
            work = dist.irecv(received, 1)
            assert not work.is_completed()
            first = work.get_future().then(lambda future: future.value()[0].sum())
            dist.barrier()
            assert first.wait() == message(size, 1).sum()
            assert work.is_success()
            assert work.result()[0] is received
        else:
            dist.barrier()
            work = dist.isend(message(size, 1), 0)
            wait_until(work.is_completed, "the send")
            assert work.get_future().wait()[0].numel() == size


def test_handles() -> None:
    run_ranks(use_handles, 2)


def call_with_other_integers() -> None:
    rank, (previous, following) = dist.get_rank(), neighbours()
    for integer in (np.int64, torch.tensor):
        sending = dist.isend(message(7, rank), integer(following), tag=integer(3))  # type: ignore[arg-type]
        received = torch.empty(7, dtype=torch.uint8)
        dist.recv(received, integer(previous), tag=integer(3))  # type: ignore[arg-type]
        check(received, message(7, previous), f"by {integer}")
        assert sending is not None
        sending.wait()


def test_ranks_and_tags_of_numpy_and_torch() -> None:
    run_ranks(call_with_other_integers, 2)


def leave_after_sending() -> None:
    """What was sent is there for the receiver although the sender has left the group."""
    group = dist.new_group()
    if dist.get_rank() == 0:
        dist.send(message(5_000, 0), 1, group=group)
        dist.destroy_process_group(group)
        dist.barrier()
        return
    dist.barrier()
    dist.recv(received := torch.zeros(5_000, dtype=torch.uint8), 0, group=group)
    check(received, message(5_000, 0), "the message of a rank that has left")
    dist.destroy_process_group(group)


def test_leave_after_sending() -> None:
    run_ranks(leave_after_sending, 2)


# ---- torch's other names -------------------------------------------------------------------------------------------


def batches_and_objects() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    others = [peer for peer in range(world_size) if peer != rank]
    received = {peer: torch.zeros(200_000, dtype=torch.uint8) for peer in others}
    operations = [dist.P2POp(dist.isend, message(200_000, rank, peer), peer, tag=9) for peer in others]
    operations += [dist.P2POp(dist.irecv, received[peer], peer, tag=9) for peer in others]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for peer in others:
        check(received[peer], message(200_000, peer, rank), f"the batch from {peer}")

    following, previous = neighbours()
    objects: list[Any] = [None, None]
    knows_batches = "use_batch" in inspect.signature(dist.send_object_list).parameters  # torch 2.6 does not
    for how in ({"use_batch": False}, {"use_batch": True}) if knows_batches else ({},):
        dist.send_object_list([{"from": rank}, "x" * 100], following, **how)
        assert dist.recv_object_list(objects, previous, **how) == previous
        assert objects == [{"from": previous}, "x" * 100]

    # A sub-group in the other order of ranks: rank 0 of it is the last.
    members = list(reversed(range(world_size)))
    group = dist.new_group(members, use_local_synchronization=False)
    me = dist.get_rank(group)
    sending = dist.isend(message(100, rank), group=group, group_dst=(me + 1) % world_size)
    source = dist.get_global_rank(group, (me - 1) % world_size)
    target = torch.zeros(100, dtype=torch.uint8)
    assert dist.recv(target, group=group) == source
    sending.wait()
    check(target, message(100, source), "the message in a sub-group")

    world: Any = dist.group.WORLD
    world.monitored_barrier(timedelta(seconds=5), wait_all_ranks=True)
    group.monitored_barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_batches_and_objects(world_size: int) -> None:
    run_ranks(batches_and_objects, world_size)


def pending_when_all_is_over() -> int:
    group: Any = dist.group.WORLD
    peer = 1 - dist.get_rank()
    for numel in (4, 1 << 20):
        sent = dist.isend(torch.ones(numel), peer)
        dist.recv(torch.empty(numel), peer)
        sent.wait()
    return len(group.engine._p2p._mailbox.pending)


def test_nothing_is_looked_out_for_that_is_over() -> None:
    assert run_ranks(pending_when_all_is_over, 2) == [0, 0]
