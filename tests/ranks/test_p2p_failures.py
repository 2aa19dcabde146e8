"""Sends and receives that cannot end well: an error at once, or at the deadline, that says who, what and where."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from failing import Caught, attempt, expect, group_works, is_dead, kill_self, pids_of_ranks, set_deadline, wait_until
from lockstep.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    InputError,
    InputTypeError,
    RankLost,
    SharedMemoryError,
)
from lockstep.shm import mailbox
from lockstep.shm.mailbox import Mailbox
from lockstep.testing import WorkerDied, limit_s, run_ranks

HERE = Path(__file__).name
LARGE = 3_000_000
DEADLINE_S = 0.4


def line_of(function: Callable[..., object], offset: int) -> str:
    """`test_x.py:12`, so many lines below the first of a function."""
    return f"{HERE}:{function.__code__.co_firstlineno + offset}"


def zeros(numel: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


# ---- ranks that disagree -------------------------------------------------------------------------------------------

MISMATCHES = {
    "fewer elements": (zeros(8), zeros(4), "float32[8]", "float32[4]"),
    "more elements": (zeros(4), zeros(8), "float32[4]", "float32[8]"),
    "dtype": (zeros(4), zeros(4, torch.int32), "float32[4]", "int32[4]"),
    "shape": (zeros(12).view(3, 4), zeros(12).view(4, 3), "float32[3, 4]", "float32[4, 3]"),
    "nothing": (zeros(0), zeros(1), "float32[0]", "float32[1]"),
    "large": (zeros(LARGE), zeros(LARGE - 1), f"float32[{LARGE}]", f"float32[{LARGE - 1}]"),
    "large for small": (zeros(LARGE), zeros(1), f"float32[{LARGE}]", "float32[1]"),
}


def disagree(name: str, receive_first: bool) -> tuple[Caught, bool]:
    sent, received, _, _ = MISMATCHES[name]
    call = (lambda: dist.isend(sent, 1, tag=7)) if dist.get_rank() == 0 else (lambda: dist.irecv(received, 0, tag=7))
    if receive_first == (dist.get_rank() == 1):
        work = call()
        dist.barrier()
    else:
        dist.barrier()
        work = call()
    return attempt(work.wait), group_works()


@pytest.mark.parametrize("receive_first", [False, True])
def test_mismatch(receive_first: bool) -> None:
    for name, (sent, _, sent_text, received_text) in MISMATCHES.items():
        (sender, sender_works), (receiver, receiver_works) = run_ranks(disagree, 2, name, receive_first)
        sending, receiving = f"send({sent_text}, tag=7) of rank 0 (", f"recv({received_text}, src=0, tag=7)"
        pids = f"pid {sender.pid}", f"pid {receiver.pid}"
        expect(receiver, CollectiveMismatch, (0, 1), sending, receiving, *pids, HERE)
        assert str(receiver.error).count(f"{HERE}:") == 2
        if sent.numel() == LARGE:
            sending, receiving = f"send({sent_text}, dst=1, tag=7)", f"recv({received_text}, tag=7) of rank 1 ("
            expect(sender, CollectiveMismatch, (0, 1), sending, receiving, *pids, HERE)
        else:
            assert sender.error is None, "a small message has left before anybody could object"
        assert sender_works, name
        assert receiver_works, name


# ---- ranks that are gone -------------------------------------------------------------------------------------------


def lose_while_waiting(call: str, how: str) -> Caught:
    """Rank 1 goes while the others wait for it."""
    pids = pids_of_ranks()
    group = dist.group.WORLD
    if dist.get_rank() == 1:
        dist.barrier()
        if how == "killed":
            kill_self()
        elif how == "failed":
            group.fail("raised ValueError: no such file at train.py:3 in main")
        else:
            group.shutdown()
        return attempt(lambda: None)
    calls = {
        "recv": lambda: dist.recv(zeros(), 1),
        "recv from any": lambda: dist.recv(zeros()),
        "large send": lambda: dist.send(zeros(LARGE), 1),
        "many small sends": lambda: [dist.send(zeros(1000), 1) for _ in range(100)],
    }
    dist.barrier()
    if how == "killed":
        wait_until(lambda: is_dead(pids[1]), "the death of rank 1")
    return attempt(calls[call])


@pytest.mark.parametrize("how", ["killed", "failed", "left"])
@pytest.mark.parametrize("call", ["recv", "recv from any", "large send", "many small sends"])
def test_peer_is_gone(call: str, how: str) -> None:
    outcomes = run_ranks(lose_while_waiting, 2, call, how, expect_errors=True)
    texts = {"killed": "died: its process is gone", "failed": "ValueError: no such file at train.py:3", "left": "left"}
    name = {"recv from any": "recv(float32[4], src=any, tag=0)", "recv": "recv(float32[4], src=1, tag=0)"}
    expect(outcomes[0], RankLost, (1,), texts[how], name.get(call, "dst=1, tag=0)"), "was last seen in", HERE)
    if how == "killed":
        assert isinstance(outcomes[1], WorkerDied)


def die_in_the_middle(size: int) -> Caught:
    """Rank 1 is killed when it has sent three chunks of many."""
    dist.barrier()
    if dist.get_rank() == 1:
        write_piece, count = Mailbox._write_piece, 0

        def write_and_die(*args: object) -> None:
            nonlocal count
            count += 1
            if count == 3:
                kill_self()
            write_piece(*args)

        Mailbox._write_piece = write_and_die
        dist.send(zeros(size), 0)
    if dist.get_rank() == 0:
        return attempt(lambda: dist.recv(zeros(size), 1))
    return attempt(dist.barrier)


def test_sender_dies_in_the_middle() -> None:
    receiver, sender, bystander = run_ranks(die_in_the_middle, 3, 5 * LARGE, expect_errors=True)
    assert isinstance(sender, WorkerDied)
    call = f"recv(float32[{5 * LARGE}], src=1, tag=0) of the default group"
    expect(receiver, RankLost, (1,), "rank 1 (", "died: its process is gone", call, HERE)
    expect(bystander, RankLost, (1,), "rank 1 (")


def die_before_it_is_read(source: int | None) -> list[Caught]:
    """Rank 0 announces a large message and is killed; rank 1 comes for it later, and rank 2 waits for rank 1."""
    pids = pids_of_ranks()
    if dist.get_rank() == 0:
        dist.isend(zeros(LARGE), 1)
        kill_self()
    if dist.get_rank() == 2:
        return [attempt(lambda: dist.recv(zeros(), 1)), attempt(dist.barrier)]
    wait_until(lambda: is_dead(pids[0]), "the death of rank 0")
    return [attempt(lambda: dist.recv(zeros(LARGE), source)), attempt(dist.barrier)]


@pytest.mark.parametrize("source", [0, None])
def test_sender_dies_before_its_large_message_is_read(source: int | None) -> None:
    """Its memory is gone with it, which is no fault of the rank that reads."""
    _, receiver, bystander = run_ranks(die_before_it_is_read, 3, source, expect_errors=True)
    for caught in (*receiver, *bystander):
        expect(caught, RankLost, (0,), "rank 0 (", "died: its process is gone")


def announce_what_cannot_be_mapped() -> Caught:
    """The sender is alive, and continues to wait for the receiver."""
    dist.barrier()
    if dist.get_rank() == 0:
        dist.isend(zeros(LARGE), 1)
        return attempt(lambda: dist.recv(zeros(), 1))

    def refuse(_: str) -> None:
        raise SharedMemoryError(errno.EACCES, "cannot open the shared memory of process 1")

    mailbox.PoolView = refuse
    return attempt(lambda: dist.recv(zeros(LARGE), 0))


def test_memory_of_a_living_sender_cannot_be_mapped() -> None:
    sender, receiver = run_ranks(announce_what_cannot_be_mapped, 2)
    text = "raised SharedMemoryError: cannot open the shared memory of process 1"
    expect(receiver, CollectiveAborted, (1,), "rank 1 (", text, within_s=3.0)
    expect(sender, RankLost, (1,), "rank 1 (", text, within_s=3.0)


def fail_in_a_chain() -> Caught:
    """Rank 2 dies; rank 1 waits for it and rank 0 for rank 1: both blame rank 2."""
    if dist.get_rank() == 2:
        kill_self()
    return attempt(lambda: dist.recv(zeros(), dist.get_rank() + 1))


def test_chain_of_waits() -> None:
    first, second, _ = run_ranks(fail_in_a_chain, 3, expect_errors=True)
    expect(second, RankLost, (2,), "rank 2 (", "died")
    expect(first, RankLost, (2,), "rank 2 (", "died")


def outlive_a_leaver() -> Caught:
    """A receive from any source continues when one of several possible sources has left in good order."""
    group = dist.new_group()
    rank = dist.get_rank()
    if rank == 2:
        dist.destroy_process_group(group)
    dist.barrier()
    if rank == 1:
        time.sleep(0.02)  # longer than rank 0 takes to look at the others
        dist.send(zeros(), 0, group=group)
    caught = attempt(lambda: dist.recv(zeros(), group=group)) if rank == 0 else attempt(lambda: None)
    dist.barrier()
    return caught


def test_any_source_outlives_a_leaver() -> None:
    assert run_ranks(outlive_a_leaver, 3)[0].error is None


def serve_after_a_leaver() -> list[Caught]:
    """Rank 0 has posted a receive from each of its clients when rank 1 leaves; it continues with rank 2."""
    group = dist.new_group()
    rank = dist.get_rank()
    if rank == 1:
        dist.send(zeros(), 0, group=group)
        dist.barrier()
        dist.destroy_process_group(group)
        return []
    if rank == 2:
        dist.barrier()
        return [attempt(lambda: exchange_with(0, group)) for _ in range(3)]
    requests = {client: dist.irecv(zeros(), client, group=group) for client in (1, 2)}
    requests[1].wait()
    requests[1] = dist.irecv(zeros(), 1, group=group)
    dist.barrier()
    wait_until(requests[1].is_completed, "the leave of rank 1")
    outcomes = [attempt(requests[2].wait), attempt(lambda: dist.send(zeros(), 2, group=group))]
    outcomes += [attempt(requests[1].wait), attempt(lambda: dist.send(zeros(), 1, group=group))]
    return outcomes + [attempt(lambda: exchange_with(2, group)) for _ in range(2)]


def exchange_with(peer: int, group: dist.ProcessGroup) -> None:
    """Send and receive."""
    sent = dist.isend(zeros(), peer, group=group)
    dist.recv(zeros(), peer, group=group)
    sent.wait()


def test_leaver_ends_its_own_messages_alone() -> None:
    server, _, client = run_ranks(serve_after_a_leaver, 3)
    for outcome, call in zip(server[2:4], ("recv(float32[4], src=1, tag=0)", "send(float32[4], dst=1"), strict=True):
        expect(outcome, RankLost, (1,), "rank 1 (", "left the group", call, HERE)
    assert [outcome.error for outcome in (*server[:2], *server[4:], *client)] == [None] * 7


# ---- ranks that are late -------------------------------------------------------------------------------------------


def wait_in_vain(call: str, folder: str) -> Caught | tuple[Caught, bool]:
    """Rank 1 does something else: it sends with another tag, and then waits for the other to give up."""
    sent, done = Path(folder, "sent"), Path(folder, "done")
    set_deadline(DEADLINE_S)
    if dist.get_rank() == 1:
        dist.send(zeros(5), 0, tag=3)
        sent.touch()
        wait_until(done.exists, "rank 0's giving up")
        return attempt(lambda: dist.recv(zeros(), 0))
    calls = {
        "recv": lambda: dist.recv(zeros(), 1, tag=2),
        "recv from any": lambda: dist.recv(zeros(), tag=2),
        "send": lambda: dist.send(zeros(LARGE), 1, tag=2),
        "future": lambda: dist.irecv(zeros(), 1, tag=2).get_future().wait(),
    }
    wait_until(sent.exists, "the message of rank 1")
    caught = attempt(calls[call])
    done.touch()
    return caught


@pytest.mark.parametrize("call", ["recv", "recv from any", "send", "future"])
def test_peer_is_late(call: str, tmp_path: Path) -> None:
    waiting, late = run_ranks(wait_in_vain, 2, call, str(tmp_path))
    # An error that comes out of a future is torch's, with the text of ours.
    assert type(waiting.error) is (RuntimeError if call == "future" else CollectiveTimeout), waiting
    text = f"{type(waiting.error).__name__}: {waiting.error}"
    for part in ("CollectiveTimeout", f"pid {late.pid})", "was last seen in collective #1, barrier()", HERE):
        assert part in text
    assert "tag=2) of the default group at" in text
    if call.startswith("recv"):
        assert "Sent to this rank, and not received yet: send(float32[5], tag=3) at " in text
    assert DEADLINE_S * 0.9 < waiting.seconds < DEADLINE_S + limit_s(1)
    expect(late, CollectiveTimeout, (1,), "rank 0 (", "had given up", "tag=2")


def wait_in_a_receive() -> Caught:
    """Rank 0 is in a receive that nobody answers while rank 1 is in a collective: rank 1 says so."""
    if dist.get_rank() == 0:
        return attempt(lambda: dist.recv(zeros(), 1))
    group = dist.group.WORLD
    wait_until(lambda: group.engine.team.waiting(0) != "", "the receive of rank 0")
    group.set_timeout(timedelta(seconds=DEADLINE_S))
    return attempt(lambda: dist.all_reduce(zeros()))


def test_collective_names_the_receive_that_a_rank_is_in() -> None:
    receiver, waiting = run_ranks(wait_in_a_receive, 2)
    assert type(waiting.error) is CollectiveTimeout
    text = str(waiting.error)
    assert "had not entered a collective yet, then in recv(float32[4], src=1, tag=0) at " in text
    assert line_of(wait_in_a_receive, 3) in text
    assert type(receiver.error) is CollectiveTimeout
    assert "had given up" in str(receiver.error)


def lose_patience() -> tuple[Caught, bool]:
    """A wait of one's own ends; the receive continues, and so does the group."""
    received = zeros()
    if dist.get_rank() == 1:
        dist.barrier()
        dist.send(torch.ones(4), 0)
        return attempt(lambda: None), group_works()
    work = dist.irecv(received, 1)
    caught = attempt(lambda: work.wait(timedelta(seconds=0.05)))
    dist.barrier()
    work.wait()
    assert torch.equal(received, torch.ones(4))
    return caught, group_works()


def test_wait_with_a_timeout() -> None:
    (caught, works), _ = run_ranks(lose_patience, 2)
    assert type(caught.error) is CollectiveTimeout
    assert "recv(float32[4], src=1, tag=0) of the default group" in str(caught.error)
    assert "it continues" in str(caught.error)
    assert 0.04 < caught.seconds < limit_s(1)
    assert works


def post_long_before() -> bool:
    """A receive that nobody waits for has no deadline."""
    dist.group.WORLD.set_timeout(timedelta(seconds=0.1))
    if dist.get_rank() == 1:
        time.sleep(0.3)  # longer than the deadline
        dist.send(torch.ones(4), 0)
        return True
    received = zeros()
    work = dist.irecv(received, 1)
    wait_until(work.is_completed, "the receive")
    work.wait()
    return torch.equal(received, torch.ones(4))


def test_early_receive_has_no_deadline() -> None:
    assert run_ranks(post_long_before, 2) == [True, True]


# ---- the group ends, or the call is wrong --------------------------------------------------------------------------


def shut_down() -> list[Caught]:
    """Rank 1 stays until rank 0 has gone: a message to one that leaves meanwhile ends in another way."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if dist.get_rank() == 1:
        store.wait(["rank 0 is through"])
        return []
    works = [dist.irecv(zeros(), 1), dist.isend(zeros(LARGE), 1)]
    dist.group.WORLD.shutdown()
    caught = [attempt(work.wait) for work in works]
    store.set("rank 0 is through", "1")
    return caught


def test_shutdown_ends_what_is_pending() -> None:
    outcomes, _ = run_ranks(shut_down, 2)
    assert len(outcomes) == 2
    for caught in outcomes:
        assert type(caught.error) is CollectiveAborted
        assert "the group was shut down before this had finished" in str(caught.error)


def call_wrongly() -> bool:
    with pytest.raises(InputError, match="the tag is -1; expected an integer from 0 on"):
        dist.isend(zeros(), 0, tag=-1)
    with pytest.raises(InputTypeError, match="the tag is 'x'"):
        dist.irecv(zeros(), 0, tag="x")
    with pytest.raises(InputTypeError, match=r"the rank is 0\.5"):
        dist.irecv(zeros(), 0.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="there is no rank 5 in the default group, which has 1 ranks"):
        dist.group.WORLD.send([zeros()], 5, 0)
    # Ranks that are counted wrong, as by rank - 1: not those of a receive from any.
    with pytest.raises(InputError, match="send: there is no rank -1 in the default group"):
        dist.isend(zeros(), -1)
    with pytest.raises(InputError, match="recv: there is no rank -1 in the default group"):
        dist.irecv(zeros(), -1)
    with pytest.raises(InputTypeError, match=r"send takes dense tensors, got layout torch.sparse_coo"):
        dist.isend(torch.eye(2).to_sparse(), 0)
    with pytest.raises(InputError, match="the lockstep group supports CPU and CUDA tensors, got one on meta"):
        dist.irecv(torch.empty(3, device="meta"), 0)
    return group_works()


def test_wrong_arguments() -> None:
    assert run_ranks(call_wrongly, 1) == [True]


def fork_with_a_receive() -> bool:
    """A child of a rank does not move the rank's messages."""
    rank = dist.get_rank()
    received = zeros()
    work = dist.irecv(received, 1) if rank == 0 else None
    child = os.fork()
    if child == 0:
        status = 1
        try:
            call = work.wait if work is not None else lambda: dist.isend(zeros(), 0)
            status = 0 if isinstance(attempt(call).error, CollectiveError | RuntimeError) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    dist.barrier()  # What is sent before the other child waits would already be there, and no wait refused.
    if work is None:
        dist.send(torch.ones(4), 0)
        return True
    work.wait()
    return torch.equal(received, torch.ones(4))


def test_fork_leaves_messages_alone() -> None:
    assert run_ranks(fork_with_a_receive, 2) == [True, True]
