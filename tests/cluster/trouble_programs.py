"""What goes wrong between hosts, for `test_hosts_trouble.py`. Each function runs on every rank."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hosts_programs import TIMEOUT_S, raised_by, world
from lockstep.comm.hosts import gloo_connections, group
from lockstep.comm.hosts.link_store import LinkStore
from lockstep.comm.hosts.team import HostsTeam
from lockstep.errors import SharedMemoryError
from lockstep.shm.segment import Segment
from lockstep.testing import limit_s
from lockstep.torch_private.groups import default_store

Outcome = tuple[str, str, float, tuple[int, ...]]

_LARGE = 100_000  # float32 values: announced, and moved by Gloo


def _die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for(key: str) -> None:
    default_store().wait([key])


# ---- point to point ----------------------------------------------------------------------------------


def sender_dies(when: str) -> dict[str, Any]:
    """Rank 1 has begun to send a large tensor to rank 0 and dies; what rank 0 receives."""
    with world() as opened:
        if opened.rank == 1:
            if when == "granted":
                with mock.patch.object(HostsTeam, "start_send", _die):
                    dist.send(torch.ones(_LARGE), 0)
            dist.isend(torch.ones(_LARGE), 0)
            _die()
        buffer = torch.full((_LARGE,), -1.0)
        return {"raised": raised_by(lambda: _receive_late(buffer)), "first": buffer[0].item()}


def _receive_late(buffer: torch.Tensor) -> None:
    """Receive from rank 1, and look only when Gloo has nothing under way any more."""
    transfers: list[Any] = []
    start = HostsTeam.start_receive

    def recorded(*args: Any) -> Any:
        made = start(*args)
        transfers.extend(made)
        return made

    are_done = HostsTeam.are_done

    def once_gloo_is_through(team: HostsTeam, requests: Any) -> bool:
        until = time.monotonic() + limit_s(20)  # in one of some hundred runs Gloo does not learn of it
        while not all(one.is_done for one in transfers) and time.monotonic() < until:
            pass
        return are_done(team, requests)

    with (
        mock.patch.object(HostsTeam, "start_receive", recorded),
        mock.patch.object(HostsTeam, "are_done", once_gloo_is_through),
    ):
        dist.recv(buffer, 1)


def one_sender_stalls() -> list[float]:
    """Rank 0 receives from rank 1, which stalls, and from rank 2, which does not; what comes from rank 2, and 1."""
    with world() as opened:
        if opened.rank == 1:
            start = HostsTeam.start_send

            def late(*args: Any) -> Any:
                default_store().set("1 may send", "so")
                _wait_for("heard of 2")
                return start(*args)

            with mock.patch.object(HostsTeam, "start_send", late):
                dist.send(torch.full((_LARGE,), 1.0), 0)
        elif opened.rank == 2:
            _wait_for("1 may send")
            dist.send(torch.full((_LARGE,), 2.0), 0)
        else:
            buffers = [torch.zeros(_LARGE), torch.zeros(_LARGE)]
            first, second = dist.irecv(buffers[0], 1), dist.irecv(buffers[1], 2)
            assert first is not None
            assert second is not None
            second.wait()
            got = [buffers[1][-1].item()]
            default_store().set("heard of 2", "so")
            first.wait()
            return [*got, buffers[0][-1].item()]
        return []


# ---- collectives -------------------------------------------------------------------------------------


def parent_of_a_worker_dies(culprit: int) -> Outcome:
    """A rank forks a process, which lives on when the rank is killed."""
    with world() as opened:
        dist.barrier()
        if opened.rank == culprit:
            child = os.fork()
            if not child:
                signal.pause()
            default_store().set("child", str(child))
            _die()
        outcome = raised_by(lambda: dist.all_reduce(torch.ones(1)))
        dist_store = default_store()
        dist_store.set(f"seen {opened.rank}", "so")
        dist_store.wait([f"seen {rank}" for rank in range(opened.world_size) if rank != culprit])
        return outcome


def one_is_late(culprit: int) -> dict[str, Any]:
    """A rank comes to a gather of a group, and sends late; whom the root misses, and sums of another group since."""
    with world() as opened:
        group = dist.new_group()
        group._get_backend(torch.device("cpu")).engine.timeout_s = 1.0  # type: ignore[attr-defined]
        exchange = HostsTeam.exchange

        def late(*args: Any) -> None:
            _wait_for("missed")
            exchange(*args)

        def gather() -> None:
            outputs = [torch.empty(_LARGE) for _ in range(opened.world_size)] if opened.rank == 0 else None
            dist.gather(torch.ones(_LARGE), outputs, 0, group=group)

        with mock.patch.object(HostsTeam, "exchange", late if opened.rank == culprit else exchange):
            outcome = raised_by(gather)
        if opened.rank == 0:
            default_store().set("missed", "so")
        sums = []
        for number in range(4):
            value = torch.full((_LARGE,), float(number))
            dist.all_reduce(value)
            sums.append((value.min().item(), value.max().item()))
            if number == 1:
                dist.destroy_process_group(group)
        return {"raised": outcome, "sums": sums}


def no_memory_for_slots(host: int, ranks_per_host: int) -> dict[str, Any]:
    """The ranks of a host cannot have the slots for large tensors."""
    with world() as opened:
        refuse = mock.patch.object(Segment, "create", side_effect=SharedMemoryError("no memory is left"))
        is_there = opened.rank // ranks_per_host == host
        group_of_all = dist.new_group()
        with refuse if is_there else contextlib.nullcontext():
            found = {"all_reduce": raised_by(lambda: dist.all_reduce(torch.ones(_LARGE)))}

            def broadcast() -> None:
                dist.broadcast(torch.ones(_LARGE), 0, group=group_of_all)
                dist.barrier(group_of_all)  # Other hosts may have all that they need.

            found["broadcast"] = raised_by(broadcast)
        value = torch.ones(_LARGE)
        dist.all_reduce(value)
        return {**found, "afterwards": value[-1].item()}


def dies_while_first_ranks_connect(members: list[int]) -> list[Outcome]:
    """The last rank of a group dies in its first large sum, when it has told the others where it listens."""
    with world(timeout=limit_s(TIMEOUT_S)) as opened:
        group = dist.new_group(members)
        if opened.rank not in members:  # the one with the store
            default_store().wait([f"seen {rank}" for rank in members[:-1]])
            return []
        dies = mock.patch.multiple(LinkStore, get=_die, wait=_die)
        with dies if opened.rank == members[-1] else contextlib.nullcontext():
            found = [raised_by(lambda: dist.all_reduce(torch.ones(1 << 20), group=group)) for _ in range(2)]
        default_store().set(f"seen {opened.rank}", "so")
        return found


# ---- groups ------------------------------------------------------------------------------------------


def fails_to_make_a_group(culprit: int, where: str) -> dict[str, Any]:
    """A rank fails while a group is being made, after its connections are there; the next one is made."""

    def fail(*_: Any, **__: Any) -> Any:
        raise SharedMemoryError("the memory is on fire")

    places: dict[str, Callable[[Callable[..., Any]], Any]] = {
        "gloo": lambda action: mock.patch.object(gloo_connections, "gloo_group", action),
        "memory": lambda action: mock.patch.object(group.SharedMemoryTeam, "meet", action),
        # Once it has told the others where it listens, and asks for them.
        "gloo dies": lambda _: mock.patch.multiple(LinkStore, get=_die, wait=_die),
    }
    with world(timeout=limit_s(TIMEOUT_S)) as opened, contextlib.ExitStack() as stack:
        if where.startswith("gloo") and opened.rank == 1:  # Else the group uses the connections that there are.
            stack.enter_context(mock.patch.object(gloo_connections.GlooConnections, "can_be_shared", False))
        with places[where](fail) if opened.rank == culprit else contextlib.nullcontext():
            outcome = raised_by(dist.new_group)
        if where.endswith("dies"):
            return {"raised": outcome}
        value = torch.ones(1)
        dist.all_reduce(value, group=dist.new_group())
        return {"raised": outcome, "sum": value.item()}
