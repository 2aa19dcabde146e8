"""What the ranks of test_kill.py do. Apart from it, so that the many processes it takes need not import pytest."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from failing import wait_until
from lockstep.torch_private.stores import PrefixStore, TCPStore

WORLD_SIZE = 3


def use_everything(round_number: int, **options: Any) -> None:
    """A world from its beginning to its end: collectives of all kinds, a sub-group, a few steps of a model."""
    with lockstep.init(**options) as world:
        world.process_group.set_timeout(torch.distributed.default_pg_timeout)
        for numel in (5, 20_000, 200_000):
            tensor = torch.ones(numel)
            works = [dist.all_reduce(tensor, async_op=True), dist.broadcast(tensor, 1, async_op=True)]
            dist.all_gather([torch.empty(numel) for _ in range(WORLD_SIZE)], tensor)
            dist.reduce_scatter(torch.empty(numel), [tensor] * WORLD_SIZE)
            dist.all_to_all_single(torch.empty(3 * WORLD_SIZE), torch.ones(3 * WORLD_SIZE))
            for work in works:
                assert work is not None
                work.wait()
        dist.all_gather_object([None] * WORLD_SIZE, {"round": round_number})
        pair = dist.new_group([0, 1 + round_number % 2])
        if dist.get_rank(pair) >= 0:
            dist.barrier(pair)
        train(lockstep.DistributedDataParallel if round_number % 2 else torch.nn.parallel.DistributedDataParallel)
        torch.manual_seed(round_number)
        dist.all_reduce(lockstep.symmetric_empty(1000))


def train(engine: Callable[..., torch.nn.Module]) -> None:
    model = engine(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()


def descriptors() -> list[str]:
    """What the open descriptors of this process are, apart from pipes to the test."""
    gc.collect()
    links = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    return sorted(str(link.readlink()) for link in links if link.is_symlink())


def live_until_killed(
    folder: str, port: int, init_deadline_s: float
) -> tuple[BaseException | None, float, list[str], list[str]]:
    """Use worlds one after another until an error comes; it, its time, and the descriptors before and after.

    Args:
        folder: where each rank leaves its pid.
        port: of the store in which the ranks meet.
        init_deadline_s: of `lockstep.init`.
    """
    store = TCPStore("127.0.0.1", port, is_master=False)
    before = descriptors()
    Path(folder, f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    wait_until(lambda: len(list(Path(folder).glob("pid-*"))) == WORLD_SIZE, "meeting")
    caught: BaseException | None = None
    try:
        for round_number in range(10_000):
            use_everything(round_number, store=PrefixStore(str(round_number), store), timeout=init_deadline_s)
    except RuntimeError as error:
        caught = error.with_traceback(None)
        caught.__context__ = caught.__cause__ = None
    when = time.monotonic()
    return caught, when, before, descriptors()


def open_and_close() -> tuple[list[str], list[str], int]:
    """Many worlds in one process: descriptors after the first and after the last; threads at the end."""
    use_everything(0)
    use_everything(1)
    first = descriptors()
    for round_number in range(20):
        use_everything(round_number)
    return first, descriptors(), sum(thread.name.startswith("lockstep") for thread in threading.enumerate())


def map_and_unmap() -> tuple[int, int]:
    """Memory of ours that is mapped after two worlds, and after ten."""
    counts = []
    for rounds in (2, 8):
        for round_number in range(rounds):
            use_everything(round_number)
        gc.collect()
        counts.append(sum("memfd:lockstep" in line for line in Path("/proc/self/maps").read_text().splitlines()))
    return counts[0], counts[1]
