"""The program of a rank of a way: sets it up, and carries out orders until it is told to exit.

    python -m lockstep.bench.strategies.worker WAY PORT NPROC THREADS

Started by the way's usual launcher. It reads task and orders from the parent's store (`jobs.py`).
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import lockstep
from lockstep import env
from lockstep.bench.strategies.epochs import train_epoch
from lockstep.bench.strategies.jobs import HOST, TASK_KEY
from lockstep.bench.strategies.setups import TrainingConfig, TrainingSetup, alone, build
from lockstep.bench.strategies.task import Limit, Task, build_task
from lockstep.bench.strategies.ways import ALL_THREADS, WAYS
from lockstep.launch.free_port import find_free_port

__all__ = ["main"]

_FOREVER = timedelta(days=30)


def main(arguments: list[str]) -> None:
    """Run a rank of a way, or, for "spawn", start the ranks.

    Args:
        arguments: name of the way, port of the store, number of ranks, threads per rank.
    """
    name, *numbers = arguments
    port, nproc, threads = map(int, numbers)
    if WAYS[name].starter != "spawn":
        _serve(name, port, nproc, threads)
        return
    from torch.multiprocessing.spawn import spawn

    url = f"tcp://{HOST}:{find_free_port()}"
    spawn(_spawned, args=(name, port, nproc, threads, url), nprocs=nproc)  # type: ignore[no-untyped-call]


def _spawned(local_rank: int, name: str, port: int, nproc: int, threads: int, url: str) -> None:
    """The function of a rank started by `torch.multiprocessing.spawn`."""
    for variable in (env.RANK, env.LOCAL_RANK):
        variable.set(local_rank)
    for variable in (env.WORLD_SIZE, env.LOCAL_WORLD_SIZE):
        variable.set(nproc)
    env.GROUP_RANK.set(0)
    env.GROUP_WORLD_SIZE.set(1)
    _serve(name, port, nproc, threads, url)


def _serve(name: str, port: int, nproc: int, threads: int, url: str | None = None) -> None:
    store = TCPStore(HOST, port, is_master=False, timeout=_FOREVER)
    task = build_task(json.loads(store.get(TASK_KEY)))
    device = _device(name)
    initialize = lockstep.init if url is None else functools.partial(lockstep.init, init_method=url)
    setup = build(name, TrainingConfig(task, nproc, device, initialize))
    # Last, because some ways set it too.
    torch.set_num_threads(threads * nproc if name == ALL_THREADS else threads)
    rank = _Rank(task, nproc, device, setup)
    number = 0
    while (order := json.loads(store.get(f"{name}/order/{number}")))["do"] != "leave":
        store.set(f"{name}/reply/{number}/{setup.rank}", json.dumps(rank.execute(order)))
        number += 1
    setup.close()


def _device(name: str) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = env.LOCAL_RANK.get() or 0
    if name == "horovod_itself":
        hvd = importlib.import_module("horovod.torch")
        hvd.init()
        local_rank = hvd.local_rank()
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


class _Rank:
    """The state of a rank."""

    def __init__(self, task: Task, nproc: int, device: torch.device, setup: TrainingSetup) -> None:
        self.task, self.nproc, self.device, self.setup = task, nproc, device, setup
        self.loader = task.loader(setup.rank, setup.world_size, device)
        self._alone: tuple[TrainingSetup, lockstep.DataLoader[Any]] | None = None

    def execute(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out an order, and return its reply."""
        limit = Limit(order.get("max_steps"), order.get("seconds"))
        if order["do"] == "train":
            reply = train_epoch(self.setup, self.loader, self.task, self.device, order["epoch"], limit)
            return {**reply, **_memory(self.device)}
        if order["do"] == "train_alone":
            if self._alone is None:  # created late, so that the peak memory before is the way's own
                setup = alone(
                    TrainingConfig(self.task, self.nproc, self.device), self.setup.rank, self.setup.world_size
                )
                self._alone = setup, self.task.loader_alone(setup.rank, setup.world_size, self.device)
            reply = train_epoch(*self._alone, self.task, self.device, order["epoch"], limit)
            # At the end Lockstep checks that ranks are the same. Make them the same again.
            self._alone[0].begin_again()
            return reply
        if order["do"] == "evaluate":
            return self.task.evaluate(self.setup.module, self.device, limit) if self.setup.rank == 0 else {}
        assert order["do"] == "describe", order
        parameters = sum(parameter.numel() for parameter in self.setup.module.parameters())
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {"world_size": self.setup.world_size, "parameters": parameters, "device": device}


def _memory(device: torch.device) -> dict[str, float]:
    """Peak memory of this process in bytes: resident, including memory shared with other ranks; and of the GPU."""
    match = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"peak_bytes": 1024.0 * int(match[1]) if match else 0.0, "gpu_peak_bytes": float(gpu)}


if __name__ == "__main__":
    from lockstep.bench.strategies import worker  # under the name by which spawned processes find it

    worker.main(sys.argv[1:])
