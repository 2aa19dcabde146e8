"""What ranks do in the tests of MPI; what the functions return is what the tests assert."""

from __future__ import annotations

import _thread
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from lockstep import env
from lockstep.errors import LockstepError
from lockstep.testing import limit_s

sys.path.append(str(Path(__file__).parents[1] / "soak"))  # mpirun starts this file, without what pytest adds

from random_programs.runner import run_programs

Described = tuple[str, str, float, tuple[int, ...]]


# ---- ways in ---------------------------------------------------------------------------------------


def sum_of_ranks() -> float:
    """The sum over ranks of 1, 2, …, in bfloat16."""
    tensor = torch.full((3,), dist.get_rank() + 1, dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    return float(tensor[0])


def _with_init(backend: str) -> dict[str, Any]:
    with lockstep.init(backend=backend, timeout=limit_s(30)) as world:
        return {
            "backend": world.backend,
            "actual": dist.get_backend(),
            "launcher": world.launcher,
            "place": (world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank),
            "sum": sum_of_ranks(),
        }


def _with_torch(backend: str, init_method: str | None) -> dict[str, Any]:
    dist.init_process_group(backend, init_method=init_method, timeout=timedelta(seconds=30))
    try:
        return {"actual": dist.get_backend(), "rank": dist.get_rank(), "sum": sum_of_ranks()}
    finally:
        dist.destroy_process_group()


def _between_hosts() -> dict[str, Any]:
    """As if the last rank were on another host, as far as names tell."""
    rank, world_size = env.OMPI_COMM_WORLD_RANK.get(), env.OMPI_COMM_WORLD_SIZE.get()
    assert rank is not None
    assert world_size is not None
    true_name, place = socket.gethostname, {}
    socket.gethostname = lambda: "localhost" if rank == world_size - 1 else "127.0.0.1"
    try:
        from lockstep.rendezvous import mpi

        place, mpi._rendezvous = mpi._rendezvous, place
        with lockstep.init(backend="mpi", timeout=limit_s(30)) as world:
            return {"place": (world.local_rank, world.local_world_size, world.node_rank), "sum": sum_of_ranks()}
    finally:
        mpi._rendezvous = place
        socket.gethostname = true_name


def ways_in() -> dict[str, Any]:
    """Every way to a group, one after another in one process; those that need no MPI come first."""
    found: dict[str, Any] = {"auto": _with_init("auto")}
    found["env gloo"] = _with_torch("gloo", None)
    found["mpi imported by then"] = "mpi4py.MPI" in sys.modules
    found["init"] = _with_init("mpi")
    found["init again"] = _with_init("mpi4py")
    found["env"] = _with_torch("mpi4py", None)
    found["url"] = _with_torch("mpi4py", "mpi://")
    found["hosts"] = _between_hosts()
    found["left in temp"] = [name for name in os.listdir("/tmp") if name.startswith(f"lockstep-{os.geteuid()}-mpi")]
    return found


# ---- numbers ---------------------------------------------------------------------------------------


def _bits(numel: int) -> list[int]:
    """The bits of a sum whose value depends on the order of adding."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tensor = torch.randn(numel, generator=generator) * torch.logspace(-6, 6, numel)
    dist.all_reduce(tensor)
    return tensor.view(torch.int32).tolist()


def same_bits() -> dict[str, list[list[int]]]:
    """Sums of three sizes, on a group of shared memory and on one over MPI."""
    found = {}
    for backend in ("lockstep", "mpi"):
        with lockstep.init(backend=backend, timeout=limit_s(30)):
            found[backend] = [_bits(numel) for numel in (5, 3000, 40_001)]
    return found


def numbers() -> dict[str, Any]:
    """Dtypes and operations that MPI has no words for, and a training step of torch's DDP."""
    found: dict[str, Any] = {}
    with lockstep.init(backend="mpi", timeout=limit_s(30)) as world:
        for name in ("float8_e4m3fn", "float8_e5m2", "bool", "complex64", "float16"):
            tensor = torch.full((5,), world.rank, dtype=torch.float32).to(getattr(torch, name))
            dist.all_reduce(tensor)
            found[name] = tensor.to(torch.complex64).real.tolist()
        average = torch.full((4,), float(world.rank))
        dist.all_reduce(average, dist.ReduceOp.AVG)
        found["average"] = average.tolist()
        # Larger than what is reduced at a time, and no multiple of anything.
        large = torch.ones((9 << 20) + 3)
        dist.all_reduce(large)
        found["large"] = (large.min().item(), large.max().item())
        found["weights"] = _train(world.rank)
    return found


def _train(rank: int) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3), bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(rank + step))).square().mean().backward()
        optimizer.step()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def soak(seeds: range) -> str:
    """Random programs, each checked against one process."""
    dist.init_process_group("mpi4py", timeout=timedelta(seconds=30))
    try:
        run_programs(seeds, num_steps=40)
        return "no mismatch"
    finally:
        dist.destroy_process_group()


def threads_and_groups() -> list[bool]:
    """Collectives and messages at the same time, from several threads, on overlapping groups and the world."""
    right: list[bool] = []
    with lockstep.init(backend="mpi", timeout=limit_s(40)) as world:
        rank, world_size = world.rank, world.world_size
        groups = [dist.new_group() for _ in range(3)]

        def reduce_often(group: dist.ProcessGroup) -> None:
            for count in range(30):
                tensor = torch.full((1 + 4000 * (count % 3),), float(rank + count))
                dist.all_reduce(tensor, group=group)
                expected = sum(range(world_size)) + world_size * count
                right.append(bool((tensor == expected).all()))

        def pass_around() -> None:
            for count in range(30):
                sent = torch.full((1 + 4000 * (count % 3),), float(rank + count))
                received = torch.zeros_like(sent)
                sending = dist.isend(sent, (rank + 1) % world_size, tag=count)
                dist.recv(received, (rank - 1) % world_size, tag=count)
                sending.wait()
                right.append(bool((received == (rank - 1) % world_size + count).all()))

        calls: list[Callable[[], None]] = [lambda group=group: reduce_often(group) for group in groups]
        workers = [threading.Thread(target=call) for call in (*calls, pass_around)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        dist.barrier()
    return right


# ---- trouble ---------------------------------------------------------------------------------------


def _attempt(call: Callable[[], Any]) -> Described:
    """How a call that must fail did: class, text, seconds, culprits."""
    start = time.monotonic()
    try:
        call()
    except LockstepError as error:
        return type(error).__name__, str(error), time.monotonic() - start, getattr(error, "culprits", ())
    except KeyboardInterrupt:
        return "KeyboardInterrupt", "", time.monotonic() - start, ()
    return "", "nothing was raised", time.monotonic() - start, ()


def _ones(numel: int = 3) -> torch.Tensor:
    return torch.ones(numel)


def _interrupted(call: Callable[[], Any]) -> None:
    threading.Timer(0.2, _thread.interrupt_main).start()
    call()


def _leave_then(rank: int, call: Callable[[], Any]) -> None:
    """The last rank shuts down; the others make the call."""
    if rank == dist.get_world_size() - 1:
        world = lockstep.current_world()
        assert world is not None
        world.shutdown()
    else:
        call()


def _abort_then(rank: int, call: Callable[[], Any]) -> None:
    """The last rank gives up with a reason; the others make the call."""
    if rank == dist.get_world_size() - 1:
        world = lockstep.current_world()
        assert world is not None
        world.abort("ran out of patience")
    else:
        call()


def _await_errors(folder: str, name: str) -> None:
    """Wait until every other rank has said that it raised."""
    deadline = time.monotonic() + limit_s(20)
    while len(list(Path(folder).glob(f"{name}, *"))) < dist.get_world_size() - 1:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name}: not every other rank has raised")
        time.sleep(0.01)


def _cases(rank: int, world_size: int, folder: str) -> dict[str, Callable[[], Any]]:
    """By name; in each the last rank is the odd one out. Two ranks that fit each other have the last word."""
    last = world_size - 1
    is_odd = rank == last
    return {
        "shape": lambda: dist.all_reduce(_ones(4 if is_odd else 3)),
        "operation": lambda: dist.broadcast(_ones(), 0) if is_odd else dist.all_reduce(_ones()),
        "reduce op": lambda: dist.all_reduce(_ones(), dist.ReduceOp.MAX if is_odd else dist.ReduceOp.SUM),
        "left": lambda: _leave_then(rank, lambda: dist.all_reduce(_ones())),
        "aborted": lambda: _abort_then(rank, lambda: dist.all_reduce(_ones(40_001))),
        "aborted, message": lambda: _abort_then(rank, lambda: dist.recv(_ones(), last)),
        "late": lambda: (is_odd and _await_errors(folder, "late"), dist.all_reduce(_ones())),
        "late barrier": lambda: (is_odd and _await_errors(folder, "late barrier"), dist.barrier()),
        "late message": lambda: _await_errors(folder, "late message") if is_odd else dist.recv(_ones(), last),
        "message": lambda: dist.send(_ones(4), 0) if is_odd else rank == 0 and dist.recv(_ones(3), last),
        "interrupted": lambda: (
            _interrupted(lambda: dist.all_reduce(_ones())) if is_odd else (time.sleep(0.5), dist.all_reduce(_ones()))
        ),
        "symmetric": lambda: lockstep.symmetric_empty(3),
        "sparse": lambda: dist.broadcast(torch.eye(3).to_sparse(), src=0),
    }


def troubles(folder: str) -> dict[str, Described]:
    """How each case ends on this rank; a new world for each. In the folder, ranks say that they have raised."""
    found = {}
    rank, world_size = env.OMPI_COMM_WORLD_RANK.get(), env.OMPI_COMM_WORLD_SIZE.get()
    assert rank is not None
    assert world_size is not None
    for name, call in _cases(rank, world_size, folder).items():
        world = lockstep.init(backend="mpi", timeout=limit_s(20))
        if name != "left":
            dist.barrier()
        if "late" in name:
            world.process_group.set_timeout(timedelta(seconds=1))
        found[name] = _attempt(call)
        Path(folder, f"{name}, {rank}").touch()
        world.shutdown()
    return found


# ---- all in one start, because importing torch takes longer than what is tested ----------------------


def without_failures() -> dict[str, Any]:
    """All that ends well."""
    import sharded_programs  # which needs the search path of the tests, and scripts run without

    return {
        "ways in": ways_in(),
        "bits": same_bits(),
        "numbers": numbers(),
        "threads": threads_and_groups(),
        "random programs": soak(range(4)),
        "sharded": sharded_programs.train(backend="mpi"),
    }


# ---- ends ------------------------------------------------------------------------------------------


def raise_on_one() -> None:
    """Rank 1 raises, rank 0 comes to a collective that tells it, and rank 2 to nothing any more."""
    from lockstep.comm.mpi import departures

    departures._ABORT_AFTER_S = 2.0
    world = lockstep.init(backend="mpi", timeout=limit_s(60))
    dist.barrier()
    if world.rank == 1:
        raise ValueError("out of cheese")
    if world.rank == 2:
        time.sleep(600)
    dist.all_reduce(_ones())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
