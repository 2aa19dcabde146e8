"""A peer of `lockstep bench comm`: times MPI's operations through mpi4py. Needs mpi4py only.

Run as a file under mpiexec, by a Python that need not have torch: `python mpi_program.py JOB`, where JOB is JSON with
`verbs`, `sizes_bytes`, `seconds` and `sample_s`. Rank 0 prints a line of JSON per sample: verb, bytes, seconds,
iterations. Buffers do not need NumPy; elements are 4-byte floats, reductions are sums.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["main"]

_MOST_ITERATIONS = 4096

_Call = Callable[[], Any]


def _calls(
    comm: Any, mpi: Any, send: bytearray, recv: bytearray, sizes: Sequence[int]
) -> dict[tuple[str, int], tuple[_Call, int]]:
    """(verb, bytes) -> the call, and the number of messages that it sends one after the other."""
    n, rank = comm.Get_size(), comm.Get_rank()
    is_root = rank == 0
    made: dict[tuple[str, int], tuple[_Call, int]] = {}

    def floats(buffer: bytearray, count: int) -> list[Any]:
        return [memoryview(buffer)[: 4 * count], mpi.FLOAT]  # mpi4py derives the count per rank

    for count in sorted({max(1, size // 4) for size in sizes}):
        key, whole = 4 * count, floats(recv, count)
        if is_root:
            add = functools.partial(comm.Reduce, mpi.IN_PLACE, whole)
        else:
            add = functools.partial(comm.Reduce, whole, None)
        made["all_reduce", key] = (functools.partial(comm.Allreduce, mpi.IN_PLACE, whole), 1)
        made["reduce", key] = (add, 1)
        made["broadcast", key] = (functools.partial(comm.Bcast, whole), 1)
        if n > 1:
            made["send_recv", key] = (_ping_pong(comm, floats(send, count), whole, rank), 2)
    for count in sorted({max(1, size // (4 * n)) for size in sizes}):
        key = 4 * count * n
        send_part, recv_part = floats(send, count), floats(recv, count)
        send_all, recv_all = floats(send, count * n), floats(recv, count * n)
        made["all_gather", key] = (functools.partial(comm.Allgather, send_part, recv_all), 1)
        made["gather", key] = (functools.partial(comm.Gather, send_part, recv_all if is_root else None), 1)
        made["scatter", key] = (functools.partial(comm.Scatter, send_all if is_root else None, recv_part), 1)
        made["reduce_scatter", key] = (functools.partial(comm.Reduce_scatter_block, send_all, recv_part), 1)
        made["all_to_all", key] = (functools.partial(comm.Alltoall, send_all, recv_all), 1)
    made["barrier", 0] = (comm.Barrier, 1)
    return made


def _ping_pong(comm: Any, send: list[Any], recv: list[Any], rank: int) -> _Call:
    def first() -> None:
        comm.Send(send, 1)
        comm.Recv(recv, 1)

    def second() -> None:
        comm.Recv(recv, 0)
        comm.Send(recv, 0)

    return first if rank == 0 else second if rank == 1 else lambda: None


def _time(comm: Any, mpi: Any, call: _Call, iterations: int) -> float:
    """Mean seconds per call on the slowest rank."""
    comm.Barrier()
    call()
    started = time.perf_counter()
    for _ in range(iterations):
        call()
    return float(comm.allreduce((time.perf_counter() - started) / iterations, mpi.MAX))


def main() -> None:
    """The function of each rank."""
    from mpi4py import MPI as mpi  # noqa: N811

    job = json.loads(sys.argv[1])
    comm = mpi.COMM_WORLD
    largest = max([*job["sizes_bytes"], 4 * comm.Get_size()])
    send, recv = (bytearray(largest) for _ in range(2))
    calls = {
        key: call for key, call in _calls(comm, mpi, send, recv, job["sizes_bytes"]).items() if key[0] in job["verbs"]
    }
    iterations = {}
    for key, (call, _) in calls.items():
        once = min(_time(comm, mpi, call, 1) for _ in range(3))
        iterations[key] = comm.bcast(max(1, min(_MOST_ITERATIONS, int(job["sample_s"] / max(once, 1e-7)))), 0)
    started = time.perf_counter()
    while True:
        for key, (call, messages) in calls.items():
            seconds = _time(comm, mpi, call, iterations[key]) / messages
            if comm.Get_rank() == 0:
                print(json.dumps([*key, seconds, iterations[key]]), flush=True)
        if comm.bcast(time.perf_counter() - started, 0) >= job["seconds"]:
            break


if __name__ == "__main__":
    main()
