"""Rank processes for measurements: starts them, waits with a deadline, and returns rank 0's result.

Independent of Lockstep's launcher on purpose: the measured code should not also run the
measurement. The parent hosts a TCP store on a free local port and puts the job into it. A rank is
`python -m lockstep.bench.ranks …`; it reads the job from the store, joins a gloo group over it (the
control plane) and calls one function; rank 0 puts its result into the store.

Intermediate results of rank 0 (`tell`) reach the parent through a pipe, even if the run ends early.
Ctrl-C reaches only the parent, because ranks run in their own sessions.

No rank outlives the parent, however it ends: ranks ask the kernel to be killed with it. No file
is written.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

from lockstep import env, libc
from lockstep.topology.mpi import read_mpi

__all__ = ["Job", "RankFailed", "run_ranks", "tell"]

_HOST = "127.0.0.1"
_JOB_KEY, _ANSWER_KEY = "bench/job", "bench/answer"
_COLLECTIVE_TIMEOUT = timedelta(seconds=120)
_PYTHON_MODULE = (sys.executable, "-m", "lockstep.bench.ranks")
_RUN = "run"  # instead of an entry: exec this command, which dies with the parent
_ASK_MPI = -1  # instead of a rank: ask MPI

Job = Mapping[str, object]
RankFunction = Callable[[Job], object]

_to_parent: int | None = None  # a pipe, on rank 0, if the parent listens


class RankFailed(RuntimeError):
    """A rank failed or did not finish in time; its own output says why."""


def tell(part: object) -> None:
    """Send an intermediate result to the parent. Local; does nothing on ranks other than 0.

    Args:
        part: anything that JSON can represent.
    """
    if _to_parent is not None:
        data = json.dumps(part).encode() + b"\n"
        while data:
            data = data[os.write(_to_parent, data) :]


def run_ranks(
    function: RankFunction,
    world_size: int,
    job: Job,
    *,
    threads: int,
    timeout_s: float,
    backend: str = "gloo",
    on_part: Callable[[Any], object] | None = None,
    through: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> object:
    """Run a function in `world_size` new processes on this host.

    Args:
        function: a module-level function; called on every rank as `function(job)`, with
            `torch.distributed` initialised. Rank 0's return value must be JSON-able.
        world_size: number of ranks.
        job: JSON-able, the same for all ranks.
        threads: intra-op threads of each rank.
        timeout_s: total time limit, including process start.
        backend: backend of the default group.
        on_part: called in this process with everything that rank 0 sends by `tell`, as it arrives, before this function
            returns or raises.
        through: a command such as `mpirun -np 2` that starts the ranks, which read their rank from MPI's variables;
            empty to start them directly.
        variables: added to the environment of the ranks.

    Returns:
        Rank 0's return value.

    Raises:
        RankFailed: a rank exited with an error, or the time is up. All ranks have been killed.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    store.set(_JOB_KEY, json.dumps(dict(job)))
    environ = {**env.snapshot(), **(variables or {})}
    env.OMP_NUM_THREADS.set(str(threads), environ)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_root_of(function), environ.get("PYTHONPATH", "")]))
    entry = f"{function.__module__}:{function.__qualname__}"
    processes: list[subprocess.Popen[bytes]] = []
    with _Parts(on_part) as parts:
        try:
            for rank in [_ASK_MPI] if through else range(world_size):
                numbers = (store.port, rank, world_size, threads, os.getpid(), parts.writer if rank <= 0 else -1)
                command = [*_PYTHON_MODULE, entry, backend, *map(str, numbers)]
                if through:
                    command = [*_PYTHON_MODULE, _RUN, str(os.getpid()), *through, *command]
                kept = (parts.writer,) if rank == 0 else ()
                processes.append(
                    subprocess.Popen(
                        command, env=environ, stdin=subprocess.DEVNULL, pass_fds=kept, start_new_session=True
                    )
                )
            if not through:  # otherwise rank 0 has yet to open it
                parts.close_writer()
            _wait(processes, parts, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return json.loads(store.get(_ANSWER_KEY))


class _Parts:
    """The parent's end of the pipe for `tell`. Closing it first delivers everything that was sent."""

    def __init__(self, on_part: Callable[[Any], object] | None) -> None:
        self._on_part = on_part or (lambda part: None)
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._rest = b""

    def __enter__(self) -> _Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_writer()
        self.receive()
        os.close(self.reader)

    def close_writer(self) -> None:
        """Close this process's copy of the writing end, so that only rank 0 has it."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def receive(self) -> bool:
        """Deliver what has arrived; returns whether more may arrive."""
        while True:
            try:
                data = os.read(self.reader, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._on_part(json.loads(line))


def _root_of(function: RankFunction) -> str:
    """The folder from which a rank can import the function's module."""
    module = sys.modules[function.__module__]
    if module.__file__ is None:
        return ""
    path = Path(module.__file__).resolve()
    return str(path.parents[function.__module__.count(".")])


def _wait(processes: list[subprocess.Popen[bytes]], parts: _Parts, deadline: float) -> None:
    """Sleep until all ranks have exited with 0; raise as soon as one fails."""
    waiting = {os.pidfd_open(process.pid): rank for rank, process in enumerate(processes)}
    heard = [parts.reader]
    try:
        while waiting:
            ready = connection.wait([*waiting, *heard], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {sorted(waiting.values())} did not finish before the deadline")
            for descriptor in ready:
                assert isinstance(descriptor, int)
                if descriptor == parts.reader:
                    heard = heard if parts.receive() else []
                    continue
                rank = waiting.pop(descriptor)
                os.close(descriptor)
                if code := processes[rank].wait():
                    raise RankFailed(f"rank {rank} of {len(processes)} exited with code {code}")
    finally:
        for descriptor in waiting:
            os.close(descriptor)


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    libc.die_with_parent()
    if os.getppid() != parent_pid:  # it died before the call above
        sys.exit(1)


def _rank_main(
    entry: str, backend: str, port: int, rank: int, world_size: int, threads: int, parent_pid: int, pipe: int
) -> None:
    """The main function of a rank process."""
    _die_with_parent(os.getppid() if rank == _ASK_MPI else parent_pid)  # before the imports below, which take seconds
    if rank == _ASK_MPI:
        found = read_mpi(env.snapshot())
        if found is None or found.world_size != world_size:
            raise RankFailed(f"MPI did not start {world_size} ranks; according to its variables: {found}")
        rank = found.rank
        pipe = os.open(f"/proc/{parent_pid}/fd/{pipe}", os.O_WRONLY) if rank == 0 else -1
    if pipe >= 0:
        global _to_parent
        os.set_inheritable(pipe, False)
        _to_parent = pipe
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    module_name, _, function_name = entry.partition(":")
    function: RankFunction = getattr(importlib.import_module(module_name), function_name)
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=_COLLECTIVE_TIMEOUT)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_COLLECTIVE_TIMEOUT)
    dist.barrier()  # a rank that finishes at once would close connections that gloo is still opening
    answer = function(json.loads(store.get(_JOB_KEY)))
    if rank == 0:
        store.set(_ANSWER_KEY, json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    from lockstep.bench import ranks  # under the name from which others import `tell`

    if sys.argv[1] == _RUN:
        ranks._die_with_parent(int(sys.argv[2]))
        os.execvp(sys.argv[3], sys.argv[3:])
    _entry, _backend, *_numbers = sys.argv[1:]
    ranks._rank_main(_entry, _backend, *map(int, _numbers))
