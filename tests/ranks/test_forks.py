"""Children that a rank forks, such as the workers of a DataLoader: whatever they do, the rank stays as it is."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import lockstep
from failing import Caught, attempt, expect, group_works, is_dead, wait_until
from lockstep import env
from lockstep.errors import NotInitialized, RankLost
from lockstep.testing import run_ranks


def in_child(function: Callable[[], object], *, as_interpreter: bool = True) -> int:
    """Fork, call, end as the interpreter would; the exit code (negative: the signal)."""
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            function()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        finally:
            if as_interpreter:
                gc.collect()
                atexit._run_exitfuncs()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fail() -> None:
    raise ValueError("a child's own trouble")


def use_inherited_group() -> None:
    """Every way to touch what the child has inherited; each is an error that says so, or does nothing."""
    try:
        for call in (dist.barrier, lambda: dist.all_reduce(torch.ones(3)), lambda: lockstep.symmetric_empty(3)):
            error = attempt(call).error
            assert isinstance(error, NotInitialized), error
            assert "this process is a fork of rank " in str(error)
            assert f"pid {os.getppid()}" in str(error)
        world = lockstep.current_world()
        if world is not None:
            world.abort("a child gives up")
            assert lockstep.current_world() is None
        else:
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        os._exit(99)


def leave_world() -> None:
    world = lockstep.current_world()
    assert world is not None
    with world:
        raise ValueError("out of the child's world")


CHILDREN: dict[str, tuple[Callable[[], object], int]] = {
    "ends": (lambda: None, 0),
    "exits": (lambda: sys.exit(3), 3),
    "raises": (fail, 1),
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "destroys the group": (dist.destroy_process_group, 0),
    "uses the group": (use_inherited_group, 0),
}


def fork_children(with_world: bool) -> dict[str, tuple[int, bool]]:
    """Each kind of child, with asynchronous calls under way; its exit code, and whether the group works after it."""
    world = lockstep.init() if with_world else None
    found = {}
    for name, (function, _) in CHILDREN.items():
        tensor = torch.ones(500_000)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        code = in_child(function)
        work.wait()
        found[name] = (code, bool((tensor == dist.get_world_size()).all()) and group_works())
    if world is not None:
        found["leaves the world"] = (in_child(leave_world), group_works())
        assert lockstep.current_world() is world
        world.shutdown()
    return found


@pytest.mark.parametrize("with_world", [False, True])
def test_children_do_not_disturb_their_rank(with_world: bool, capfd: pytest.CaptureFixture[str]) -> None:
    wanted = {name: (code, True) for name, (_, code) in CHILDREN.items()}
    if with_world:
        wanted["leaves the world"] = (1, True)
    assert run_ranks(fork_children, 2, with_world, init=not with_world) == [wanted] * 2
    assert "a child's own trouble" in capfd.readouterr().err


class Squares(Dataset[int]):
    """Says of each item which process made it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return index * index, os.getpid()


def load_while_reducing() -> tuple[int, bool, bool]:
    """A DataLoader with forked workers, of which one dies badly, while collectives continue."""
    total = torch.zeros((), dtype=torch.int64)
    pids = set()
    for squares, makers in DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        share = squares.sum()
        dist.all_reduce(share)
        total += share
        pids.update(makers.tolist())
    return int(total), os.getpid() not in pids and len(pids) == 2, group_works()


def test_workers_of_a_data_loader() -> None:
    total = 2 * sum(index * index for index in range(40))
    assert run_ranks(load_while_reducing, 2) == [(total, True, True)] * 2


def compute_in_pool() -> tuple[list[int], bool]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        powers = pool.map(abs, [-1, -2, -3])
        dist.barrier()
    return powers, group_works()


def test_pool_of_processes() -> None:
    assert run_ranks(compute_in_pool, 2) == [([1, 2, 3], True)] * 2


def world_of_its_own() -> float:
    tensor = torch.tensor([41.0])
    for variable in (env.RANK, env.WORLD_SIZE, env.LOCAL_RANK, env.LOCAL_WORLD_SIZE, env.LOCKSTEP_RENDEZVOUS):
        variable.unset()
    lockstep_world = lockstep.current_world()
    if lockstep_world is not None:
        lockstep_world.shutdown()
    with lockstep.init():
        dist.all_reduce(tensor)
    return tensor.item()


def open_world_in_child() -> tuple[int, bool]:
    with lockstep.init():
        code = in_child(lambda: sys.exit(int(world_of_its_own())))
        return code, group_works()


def test_child_may_open_a_world_of_its_own() -> None:
    assert run_ranks(open_world_in_child, 2, init=False) == [(41, True)] * 2


# ---- children that are ranks ---------------------------------------------------------------------------------------


def raise_error() -> None:
    raise ValueError("no more data")


def exit_after_error() -> None:
    """As torch.multiprocessing.spawn does."""
    try:
        raise_error()
    except ValueError:
        sys.exit(1)


def keep_an_idle_executor() -> None:
    """Its thread is no daemon, and ends only behind multiprocessing's finalizers."""
    executor.append(ThreadPoolExecutor(1))
    executor[0].submit(int).result()


def send_at_exit() -> None:
    atexit.register(lambda: dist.send(torch.tensor(-1), 0))


executor: list[ThreadPoolExecutor] = []
RAISED = f"failed: it raised ValueError: no more data at {__file__}:{raise_error.__code__.co_firstlineno + 1}"
ENDS: dict[str, tuple[Callable[[], object], str]] = {
    "returns": (int, "left the group"),
    "exits": (sys.exit, "left the group"),
    "raises": (raise_error, RAISED),
    "exits after an error": (exit_after_error, RAISED),
    "returns beside an idle executor": (keep_an_idle_executor, "left the group"),
}


def be_rank_one(meeting: str, how: str) -> None:
    dist.init_process_group("lockstep", init_method=meeting, rank=1, world_size=2)
    dist.send(torch.tensor(os.getpid()), 0)
    ENDS[how][0]()


def be_rank_one_until_exit(meeting: str) -> None:
    dist.init_process_group("lockstep", init_method=meeting, rank=1, world_size=2)
    send_at_exit()


def receive_what_a_child_sends_at_exit(meeting: str) -> int:
    process = multiprocessing.get_context("spawn").Process(target=be_rank_one_until_exit, args=(meeting,))
    process.start()
    dist.init_process_group("lockstep", init_method=meeting, rank=0, world_size=2)
    received = torch.tensor(0)
    dist.recv(received, 1)
    dist.destroy_process_group()
    process.join()
    return int(received)


def test_spawned_rank_may_communicate_in_its_exit_handlers(tmp_path: Path) -> None:
    assert run_ranks(receive_what_a_child_sends_at_exit, 1, f"file://{tmp_path}/meeting", init=False) == [-1]


def outlive_child(meeting: str, method: str, how: str) -> Caught:
    """Wait for a message of a child that has ended."""
    try:
        raise KeyError("what the parent handles is none of the child's")
    except KeyError:
        process = multiprocessing.get_context(method).Process(target=be_rank_one, args=(meeting, how))
        process.start()
    dist.init_process_group("lockstep", init_method=meeting, rank=0, world_size=2)
    pid = torch.tensor(0)
    dist.recv(pid, 1)
    wait_until(lambda: is_dead(int(pid)), "the end of the child")
    caught = attempt(lambda: dist.recv(pid, 1))
    dist.destroy_process_group()
    process.join()
    return caught


@pytest.mark.parametrize(
    ("method", "how"), [*(("fork", how) for how in ENDS), ("spawn", "returns"), ("spawn", "raises")]
)
def test_rank_that_multiprocessing_started_says_how_it_ends(method: str, how: str, tmp_path: Path) -> None:
    (caught,) = run_ranks(outlive_child, 1, f"file://{tmp_path}/meeting", method, how, init=False)
    expect(caught, RankLost, (1,), ENDS[how][1])
