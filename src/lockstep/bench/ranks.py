"""Rank processes for measurements: start them, wait with a deadline, bring rank 0's answer back.

Written apart from Lockstep's own launcher on purpose: what is measured should not also carry the
measurement. The parent holds a TCP store on a free local port and puts the job into it. A rank is
`python -m lockstep.bench.ranks …`; it takes the job from the store, joins a gloo group over it (the
control plane), calls one function, and rank 0 puts the answer back.

Nothing outlives the parent, however it ends: ranks ask the kernel to be killed with it, and no file
is written.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

from lockstep import env

__all__ = ["RankFailed", "run_ranks"]

_PR_SET_PDEATHSIG = 1
_HOST = "127.0.0.1"
_JOB_KEY, _ANSWER_KEY = "bench/job", "bench/answer"
_COLLECTIVE_TIMEOUT = timedelta(seconds=120)

Job = Mapping[str, object]
RankFunction = Callable[[Job], object]


class RankFailed(RuntimeError):
    """A rank failed or did not finish in time; its own output says why."""


def run_ranks(
    function: RankFunction, world_size: int, job: Job, *, threads: int, timeout_s: float, backend: str = "gloo"
) -> object:
    """Run a function on `world_size` fresh processes of this host.

    Args:
        function: a module-level function; called on every rank as `function(job)`, with
            `torch.distributed` initialised. Rank 0's return value must be JSON-able.
        world_size: number of ranks.
        job: JSON-able, the same for all ranks.
        threads: intra-op threads of each rank.
        timeout_s: deadline for all of it, process start included.
        backend: of the default group.

    Returns:
        What rank 0 returned.

    Raises:
        RankFailed: a rank exited with an error or the deadline passed. All ranks are dead by then.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    store.set(_JOB_KEY, json.dumps(dict(job)))
    variables = env.snapshot()
    env.OMP_NUM_THREADS.set(str(threads), variables)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [_root_of(function), variables.get("PYTHONPATH", "")]))
    entry = f"{function.__module__}:{function.__qualname__}"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            numbers = (store.port, rank, world_size, threads, os.getpid())
            command = [sys.executable, "-m", "lockstep.bench.ranks", entry, backend, *map(str, numbers)]
            processes.append(subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL))
        _wait(processes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return json.loads(store.get(_ANSWER_KEY))


def _root_of(function: RankFunction) -> str:
    """The folder from which a rank can import the function's module."""
    module = sys.modules[function.__module__]
    if module.__file__ is None:
        return ""
    path = Path(module.__file__).resolve()
    return str(path.parents[function.__module__.count(".")])


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> None:
    """Sleep until all ranks have exited well; raise as soon as one has not."""
    waiting = {os.pidfd_open(process.pid): rank for rank, process in enumerate(processes)}
    try:
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {sorted(waiting.values())} did not finish before the deadline")
            for descriptor in ready:
                assert isinstance(descriptor, int)
                rank = waiting.pop(descriptor)
                os.close(descriptor)
                if code := processes[rank].wait():
                    raise RankFailed(f"rank {rank} of {len(processes)} exited with code {code}")
    finally:
        for descriptor in waiting:
            os.close(descriptor)


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, however that happens."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the call above
        sys.exit(1)


def _rank_main(entry: str, backend: str, port: int, rank: int, world_size: int, threads: int, parent_pid: int) -> None:
    """Body of one rank process."""
    _die_with_parent(parent_pid)  # before the imports below, which take seconds
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    module_name, _, function_name = entry.partition(":")
    function: RankFunction = getattr(importlib.import_module(module_name), function_name)
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=_COLLECTIVE_TIMEOUT)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_COLLECTIVE_TIMEOUT)
    answer = function(json.loads(store.get(_JOB_KEY)))
    if rank == 0:
        store.set(_ANSWER_KEY, json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    _entry, _backend, *_numbers = sys.argv[1:]
    _rank_main(_entry, _backend, *map(int, _numbers))
