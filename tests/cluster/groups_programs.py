"""What ranks on test hosts do with several groups, for `test_hosts_groups.py`. Each function runs on every rank."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist

import lockstep
from hosts_programs import TIMEOUT_S, raised_by, world
from lockstep.comm.hosts.gloo_connections import GlooConnections
from lockstep.testing import limit_s

_Raised = tuple[str, str, float, tuple[int, ...]]


def _num_connections() -> int:
    """The connections of this process."""
    sockets = psutil.Process().net_connections(kind="tcp")
    return sum(socket.status == psutil.CONN_ESTABLISHED for socket in sockets)


def connections(num_groups: int) -> dict[str, Any]:
    """What further groups of all ranks take, and whether it is given back."""
    with world():
        dist.all_reduce(torch.ones(100_000))
        dist.barrier()
        before = _num_connections(), len(os.listdir("/proc/self/fd"))
        made = [dist.new_group() for _ in range(num_groups)]
        for group in made:
            dist.all_reduce(torch.ones(1), group=group)
        during = _num_connections()
        dist.barrier()
        for group in made:
            dist.destroy_process_group(group)
        dist.barrier()
        after = _num_connections(), len(os.listdir("/proc/self/fd"))
        dist.barrier()  # nobody leaves before all have counted
        return {"during": during - before[0], "after": after, "before": before}


def cannot_share(rank: int) -> tuple[float, int]:
    """The sum of a large tensor in a group that cannot use the default group's Gloo; and its connections."""
    with world() as opened:
        dist.all_reduce(torch.ones(100_000))
        dist.barrier()
        before = _num_connections()
        refuses = mock.patch.object(GlooConnections, "can_be_shared", False)
        with refuses if opened.rank == rank else contextlib.nullcontext():
            group = dist.new_group()
        value = torch.ones(100_000)
        dist.all_reduce(value, group=group)
        found = value.sum().item(), _num_connections() - before
        dist.barrier()
        return found


def at_the_same_time(num_groups: int, num_calls: int) -> list[float]:
    """Sums of all sizes in several groups at once, each in a thread of its own; the largest error of each group."""
    with world() as opened:
        groups = [dist.group.WORLD, *(dist.new_group() for _ in range(num_groups - 1))]
        errors = [-1.0] * num_groups

        def run(index: int) -> None:
            worst = 0.0
            for call in range(num_calls):
                value = torch.full((3 * 10 ** (call % 6),), float(index * 1000 + call * 10 + opened.rank))
                dist.all_reduce(value, group=groups[index])
                size = opened.world_size
                expected = size * (index * 1000 + call * 10) + size * (size - 1) / 2
                worst = max(worst, float((value - expected).abs().max()))
            errors[index] = worst

        threads = [threading.Thread(target=run, args=(index,)) for index in range(num_groups)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors


def made_again() -> list[float]:
    """Groups of the same names, made and destroyed by each rank in an order of its own."""
    found = []
    with world() as opened:
        ranks = list(range(opened.world_size))
        for _ in range(3):
            made = [dist.new_group(ranks, use_local_synchronization=True) for _ in range(3)]
            for group in made:
                value = torch.full((5,), float(opened.rank))
                dist.all_reduce(value, group=group)
                found.append(value[0].item())
            made = made[opened.rank % 3 :] + made[: opened.rank % 3]
            for group in made:
                dist.destroy_process_group(group)
        value = torch.ones(100_000)
        dist.all_reduce(value)
        found.append(value[0].item())
    return found


def lose_one(culprit: int) -> dict[str, _Raised]:
    """A rank is killed while the others are in two of its groups at once; a third group is without it."""
    opened = lockstep.init(device="cpu", timeout=limit_s(TIMEOUT_S))
    group, others = dist.new_group(), dist.new_group([rank for rank in range(opened.world_size) if rank != culprit])
    dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    if opened.rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    found: dict[str, _Raised] = {}

    def use_the_first() -> None:
        found["default"] = raised_by(lambda: dist.all_reduce(torch.ones(1000)))

    thread = threading.Thread(target=use_the_first)
    thread.start()
    found["group"] = raised_by(lambda: dist.all_reduce(torch.ones(1000), group=group))
    thread.join()
    value = torch.full((100_000,), 1.0)
    found["others"] = raised_by(lambda: dist.all_reduce(value, group=others))
    assert float(value[0]) == opened.world_size - 1
    opened.shutdown()
    return found


def leave_one_group(leaver: int) -> dict[str, Any]:
    """One rank leaves a group that the others still need, and stays in the default group."""
    with world() as opened:
        group = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group)
        if opened.rank == leaver:
            dist.destroy_process_group(group)
            found = ("", "", 0.0, ())
        else:
            found = raised_by(lambda: dist.all_reduce(torch.ones(1), group=group))
        value = torch.full((100_000,), 1.0)
        dist.all_reduce(value)
        again = torch.ones(1)
        dist.all_reduce(again, group=dist.new_group())
        return {"raised": found, "sums": (float(value[0]), float(again[0]))}
