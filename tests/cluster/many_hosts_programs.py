"""What ranks on four test hosts do, for `test_hosts_many.py`. Each function runs on every rank."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from hosts_programs import TIMEOUT_S, raised_by, set_deadline, world
from lockstep.comm.hosts import algorithms, first_ranks, pipeline
from lockstep.shm.kernels import divide, find_kernel
from lockstep.testing import limit_s

_Outcome = tuple[str, str, float, tuple[int, ...]]

# What travels with the notices, as messages between partners, as halves by Gloo, and in a sum of Gloo's own.
SMALL, MEDIUM, LARGE, SUMMED = 100, 3000, 250_001, 700_001
PIECED = 2_500_001  # in two sums, where a host has several ranks


def _random(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(1, 100, (numel,), generator=generator).to(dtype)


def bits_of_reductions() -> dict[str, Any]:
    """Reductions of random numbers on each path, and which differ from the tree over all ranks by a single bit."""
    different = []
    ops: dict[str, Any] = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT")}
    ops["PREMUL_SUM"] = dist._make_nccl_premul_sum(0.3)  # type: ignore[attr-defined]
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8]
    with world() as opened:
        size = opened.world_size
        layout = opened.process_group.engine.team.layout  # type: ignore[attr-defined]
        for numel in (SMALL, MEDIUM, 20_000, LARGE):
            for dtype in dtypes:
                for name, op in ops.items():
                    if name == "PREMUL_SUM" and not dtype.is_floating_point:
                        continue
                    own = _random(opened.rank, numel, dtype)
                    dist.all_reduce(own, op)
                    kernel = find_kernel(op, dtype)
                    wide = kernel.accumulate or dtype
                    parts = [_random(rank, numel, dtype) for rank in range(size)]
                    if kernel.factor is not None:
                        parts = [part.mul_(kernel.factor) for part in parts]
                    sums = []
                    for ranks in layout.hosts:
                        rows = torch.stack([parts[rank].to(wide) for rank in ranks])
                        sums.append(_in_tree(kernel.combine, rows))
                    total = _in_tree(kernel.combine, torch.stack(sums))
                    if kernel.divide:
                        divide(total, size)
                    if not torch.equal(own.view(torch.uint8), total.to(dtype).view(torch.uint8)):
                        different.append(f"{name} of {numel} {dtype}")
    return {"different": different}


def _in_tree(combine: Callable[..., torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Neighbours first, then their results; one without a neighbour goes up as it is."""
    while len(rows) > 1:
        pairs = [combine(rows[at], rows[at + 1], out=torch.empty_like(rows[at])) for at in range(0, len(rows) - 1, 2)]
        rows = torch.stack([*pairs, *rows[len(rows) - len(rows) % 2 :]])
    return rows[0]


def paths() -> list[str]:
    """Which way reductions of each size go."""
    found: list[str] = []
    doubled, halved = algorithms.HostsAlgorithms._reduce_by_doubling, pipeline._HalvingExchange.start
    summed = first_ranks.FirstRanks.start_sum

    def note_doubling(self: Any, *arguments: Any) -> Any:
        found.append("doubling")
        return doubled(self, *arguments)

    def note_halving(self: Any, *arguments: Any) -> Any:
        found.append("halving")
        return halved(self, *arguments)

    def note_sum(self: Any, *arguments: Any) -> Any:
        found.append("sum")
        return summed(self, *arguments)

    algorithms.HostsAlgorithms._reduce_by_doubling = note_doubling  # type: ignore[method-assign]
    pipeline._HalvingExchange.start = note_halving  # type: ignore[method-assign]
    first_ranks.FirstRanks.start_sum = note_sum  # type: ignore[method-assign]
    with world():
        for numel in (SMALL, MEDIUM, LARGE, SUMMED):
            dist.all_reduce(torch.ones(numel))
        dist.all_reduce(torch.ones(SUMMED, dtype=torch.bfloat16))  # is added in float32, so not by Gloo
        dist.all_reduce(torch.ones(SUMMED), dist.ReduceOp.MAX)
    return found


def large_sums() -> dict[str, Any]:
    """Large sums by every kind of call: which are wrong, and the bits of each, once and again."""
    wrong, bits = [], []
    ops: dict[str, Any] = {"SUM": dist.ReduceOp.SUM, "AVG": dist.ReduceOp.AVG}
    ops["PREMUL_SUM"] = dist._make_nccl_premul_sum(0.3)  # type: ignore[attr-defined]
    with world() as opened:
        size = opened.world_size
        symmetric = opened.process_group.symmetric_empty((SUMMED,), torch.float64)
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
            for name, op in ops.items():
                if name != "SUM" and not dtype.is_floating_point:
                    continue
                parts = torch.stack([_random(rank, SUMMED, dtype) for rank in range(size)]).double()
                expected = parts.sum(0) * {"SUM": 1.0, "AVG": 1 / size, "PREMUL_SUM": 0.3}[name]
                for memory in (torch.empty(SUMMED, dtype=dtype), symmetric, torch.empty(SUMMED, dtype=dtype)):
                    if memory.dtype is not dtype:
                        continue
                    memory.copy_(_random(opened.rank, SUMMED, dtype))
                    dist.all_reduce(memory, op)
                    bound = 1e-12 if dtype is torch.float64 else 1e-5
                    if not torch.allclose(memory.double(), expected, rtol=bound, atol=bound):
                        wrong.append(f"{name} of {dtype}")
                    bits.append(hashlib.blake2b(memory.numpy().tobytes()).hexdigest())
        for memory in (torch.empty(PIECED), opened.process_group.symmetric_empty((PIECED,), torch.float32)):
            dist.all_reduce(memory.copy_(torch.arange(PIECED) % 1009 + opened.rank))
            if not torch.equal(memory, torch.arange(PIECED) % 1009 * float(size) + size * (size - 1) / 2):
                wrong.append(f"{PIECED} numbers")
        value = torch.full((SUMMED,), opened.rank + 1.0)
        dist.reduce(value, 1)
        if value[-1] != (size * (size + 1) / 2 if opened.rank == 1 else opened.rank + 1.0):
            wrong.append("reduce")
    return {"wrong": wrong, "bits": bits}


def sum_without_descriptors(starved: int) -> _Outcome:
    """The first large sum of a group, while a rank has few descriptors left."""
    opened = lockstep.init(device="cpu", timeout=limit_s(TIMEOUT_S))
    dist.barrier()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if opened.rank == starved:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, before[1]))
    found = raised_by(lambda: dist.all_reduce(torch.ones(SUMMED)))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    opened.shutdown()
    return found


def sums_of_two_groups() -> list[float]:
    """Large sums of two groups at once, which the ranks begin in different orders."""
    found = []
    with world() as opened:
        groups = [dist.new_group(backend="lockstep"), dist.new_group(backend="lockstep")]
        for number in range(6):
            values = [torch.full((SUMMED,), float(factor)) for factor in (1, 10)]
            order = (0, 1) if (opened.rank + number) % 2 else (1, 0)
            works = {at: dist.all_reduce(values[at], group=groups[at], async_op=True) for at in order}
            for at in order:
                works[at].wait()
            found += [float(value[-1]) for value in values]
    return sorted(set(found))


def acts_in_the_middle(numel: int, culprit: int, after: int, how: str, deadline_s: float = TIMEOUT_S) -> _Outcome:
    """A rank dies or stops for long in the middle of a reduction, after so many messages of its own."""
    opened = lockstep.init(device="cpu", timeout=limit_s(TIMEOUT_S))
    dist.all_reduce(torch.ones(numel))
    set_deadline(opened, deadline_s)
    if opened.rank == culprit:
        _act_before_sending(opened, after, how, stop_s=2 * deadline_s)

    def call() -> None:
        while True:
            dist.all_reduce(torch.ones(numel))

    found = raised_by(call)
    opened.shutdown()
    return found


def _act_before_sending(opened: lockstep.World, after: int, how: str, stop_s: float) -> None:
    team = opened.process_group.engine.team  # type: ignore[attr-defined]
    left = [after]

    def act_first(send: Callable[..., Any]) -> Callable[..., Any]:
        def act_and_send(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(stop_s)  # receives nothing meanwhile, as if it were stopped
            return send(*arguments)

        return act_and_send

    team.send_message = act_first(team.send_message)
    team.send_chunk = act_first(team.send_chunk)
    team.first_ranks.start_sum = act_first(team.first_ranks.start_sum)


def same_bits_whoever_is_late() -> list[bytes]:
    """Sums of the same numbers, while another rank comes late each time."""
    found = []
    with world() as opened:
        for numel in (SMALL, MEDIUM, LARGE, SUMMED):
            for late in range(opened.world_size):
                value = _random(opened.rank, numel, torch.float32)
                if opened.rank == late:
                    time.sleep(0.02)
                dist.all_reduce(value)
                found.append(value.numpy().tobytes()[:4096])
    assert all(len(set(found[at : at + opened.world_size])) == 1 for at in range(0, len(found), opened.world_size))
    return found[:: opened.world_size]


def small_collectives() -> list[Any]:
    """What travels with the notices, many times: barriers, broadcasts, gathers, sums."""
    with world() as opened:
        rank, size = opened.rank, opened.world_size
        for number in range(60):
            dist.barrier()
            value = torch.full((3,), float(rank * number))
            dist.broadcast(value, number % size)
            assert value.tolist() == [float(number % size * number)] * 3
            outputs = [torch.empty(5, dtype=torch.int64) for _ in range(size)]
            dist.all_gather(outputs, torch.full((5,), rank + number))
            assert [one.unique().tolist() for one in outputs] == [[peer + number] for peer in range(size)]
            total = torch.tensor([rank + 1.0])
            dist.all_reduce(total)
            assert total.item() == size * (size + 1) / 2
    return ["well"]
