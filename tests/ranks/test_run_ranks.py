"""`run_ranks` itself: results, errors, deaths, hangs, surroundings, reuse, clean-up. On gloo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep import env
from lockstep.comm import deadlock
from lockstep.errors import InputError, InputTypeError, WorkerFailed
from lockstep.testing import WorkerDied, limit_s, run_ranks


def sum_of_ranks(factor: float, *, shift: float = 0.0) -> float:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    return tensor.item() * factor + shift


def process_id() -> int:
    return os.getpid()


def describe() -> dict[str, object]:
    return {
        "cwd": os.getcwd(),
        "variable": os.environ.get("LOCKSTEP_TESTING_EXAMPLE"),
        "torch_threads": torch.get_num_threads(),
        "threads": len(os.listdir("/proc/self/task")),
        "random": torch.rand(()).item(),
        "initialized": dist.is_initialized(),
        "launcher": [v.get() for v in (env.RANK, env.WORLD_SIZE, env.LOCAL_RANK, env.LOCAL_WORLD_SIZE)],
        "rendezvous": env.LOCKSTEP_RENDEZVOUS.get(),
    }


def fail_on(ranks: list[int]) -> int:
    if ranks:
        dist.barrier()  # a rank that fails sooner takes gloo's connections from those that still make theirs
    if dist.get_rank() in ranks:
        raise ValueError(f"no luck on {dist.get_rank()}")
    if ranks:
        dist.barrier()
    return dist.get_rank()


def die_on(rank: int, signal_number: int) -> str:
    if env.RANK.get() == rank:
        os.kill(os.getpid(), signal_number)
    return "alive"


def exit_on(rank: int, code: int) -> str:
    if env.RANK.get() == rank:
        os._exit(code)
    return "alive"


def hang_on(rank: int) -> None:
    if env.RANK.get() == rank:
        wait_for_ever_and_a_day()


def wait_for_ever_and_a_day() -> None:
    threading.Event().wait()


class UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def raise_unpicklable() -> None:
    raise UnpicklableError


def return_unpicklable() -> object:
    return threading.Lock()


def speak(lines: int) -> None:
    for _ in range(lines):
        print("rank", dist.get_rank(), "speaks")


def group_deadline() -> timedelta:
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_in_rank_order_and_arguments_arrive(world_size: int) -> None:
    expected = sum(range(world_size)) * 2.0 + 1.0
    assert run_ranks(sum_of_ranks, world_size, 2.0, backend="gloo", shift=1.0) == [expected] * world_size
    assert run_ranks(fail_on, world_size, [], backend="gloo") == list(range(world_size))


def test_processes_are_real_and_reused() -> None:
    first = run_ranks(process_id, 3, init=False)
    assert len({os.getpid(), *first}) == 4
    assert run_ranks(process_id, 2, init=False) == first[:2]
    assert run_ranks(process_id, 3, init=False) == first


def test_first_error_is_raised_with_a_note_of_all() -> None:
    with pytest.raises(ValueError, match="no luck on 1") as caught:
        run_ranks(fail_on, 3, [1, 2], backend="gloo")
    (note,) = caught.value.__notes__
    assert "rank 1: ValueError: no luck on 1" in note
    assert "rank 2: ValueError: no luck on 2" in note
    assert "rank 0: " in note
    assert "in fail_on" in str(caught.value.__cause__)


def test_expected_errors_are_returned() -> None:
    outcomes = run_ranks(fail_on, 2, [0, 1], backend="gloo", expect_errors=True)
    assert [str(outcome) for outcome in outcomes] == ["no luck on 0", "no luck on 1"]
    assert all(type(outcome) is ValueError for outcome in outcomes)


def test_killed_rank_is_an_outcome_and_is_replaced() -> None:
    before = run_ranks(process_id, 2, init=False)
    outcomes = run_ranks(die_on, 2, 1, signal.SIGKILL, init=False, expect_errors=True)
    assert outcomes == ["alive", WorkerDied(rank=1, signal_number=signal.SIGKILL, exit_code=137)]
    assert "SIGKILL" in str(outcomes[1])
    assert not set(before) & set(run_ranks(process_id, 2, init=False))


def test_killed_rank_raises_worker_failed() -> None:
    with pytest.raises(WorkerFailed, match="rank 0: its process was killed by SIGTERM") as caught:
        run_ranks(die_on, 2, 0, signal.SIGTERM, init=False)
    assert (caught.value.rank, caught.value.exit_code) == (0, 143)


def test_rank_that_exits_is_an_outcome() -> None:
    outcomes = run_ranks(exit_on, 2, 0, 7, init=False, expect_errors=True)
    assert outcomes == [WorkerDied(rank=0, signal_number=None, exit_code=7), "alive"]


def test_hang_dumps_stacks_and_names_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    before = run_ranks(process_id, 2, init=False)
    with pytest.raises(TimeoutError, match="rank 1 of 2 still running after "):
        run_ranks(hang_on, 2, 1, init=False, timeout=limit_s(1))
    stacks = capfd.readouterr().err
    assert "stacks of rank 1" in stacks
    assert "wait_for_ever_and_a_day" in stacks
    assert not set(before) & set(run_ranks(process_id, 2, init=False))


def test_output_goes_where_the_callers_goes(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(speak, 2, 100, backend="gloo")
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == ["rank 0 speaks"] * 100 + ["rank 1 speaks"] * 100, "whole lines of both ranks"


def test_ranks_see_the_callers_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCKSTEP_TESTING_EXAMPLE", "here")
    monkeypatch.setenv("RANK", "77")
    monkeypatch.chdir(tmp_path)
    (seen,) = run_ranks(describe, 1, backend="gloo")
    assert seen["cwd"] == str(tmp_path)
    assert seen["variable"] == "here"
    assert seen["torch_threads"] == 1
    assert seen["initialized"] is True
    assert seen["launcher"] == [None] * 4
    monkeypatch.undo()
    (after,) = run_ranks(describe, 1, backend="gloo")
    assert after["variable"] is None
    assert after["random"] == seen["random"]


def test_without_init_the_launchers_variables_are_set() -> None:
    seen = run_ranks(describe, 2, init=False)
    assert [one["launcher"] for one in seen] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    assert not any(one["initialized"] for one in seen)
    # A thread of the fork server would not survive the fork, and its locks would stay locked.
    assert [one["threads"] for one in seen] == [1, 1], "something that is imported starts a thread"
    (folder,) = {str(one["rendezvous"]) for one in seen}
    assert not os.path.exists(folder), "the folder outlives its call"
    (again, _) = run_ranks(describe, 2, init=False)
    assert again["rendezvous"] != folder


def test_group_deadline_comes_before_the_callers() -> None:
    assert run_ranks(group_deadline, 1, backend="gloo", timeout=50.0) == [timedelta(seconds=40)]


def test_what_cannot_be_pickled_is_said_clearly() -> None:
    with pytest.raises(InputTypeError, match="top level of a module"):
        run_ranks(lambda: None, 1)
    with pytest.raises(WorkerFailed, match=r"rank 0 raised UnpicklableError.*holds a lock"):
        run_ranks(raise_unpicklable, 1, init=False)
    with pytest.raises(TypeError, match="pickle"):
        run_ranks(return_unpicklable, 1, init=False)


def test_world_size_below_one() -> None:
    with pytest.raises(InputError, match="world_size is 0"):
        run_ranks(process_id, 0)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", ["exit", "kill"])
def test_nothing_is_left_when_the_caller_ends(ending: str, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from test_run_ranks import process_id\n"
        "from lockstep.testing import run_ranks\n"
        "print(*run_ranks(process_id, 2, init=False), flush=True)\n"
        + ("os.kill(os.getpid(), signal.SIGKILL)\n" if ending == "kill" else "")
    )
    paths = os.pathsep.join(filter(None, [os.path.dirname(__file__), env.PYTHONPATH.get()]))
    environ = env.snapshot() | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=limit_s(150)
    )
    assert done.returncode == (-signal.SIGKILL if ending == "kill" else 0), done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + limit_s(30)
    while left := [pid for pid in pids if alive(pid)] + list(tmp_path.glob("lockstep-testing-*")):
        assert time.monotonic() < deadline, f"left behind: {left}"
        threading.Event().wait(0.02)


def _reduce_in_a_thread() -> None:
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
    thread.start()
    thread.join()


def _counts_on_the_main_thread_alone() -> bool:
    return not deadlock._has_other_callers


def test_threads_of_one_job_do_not_hide_the_deadlocks_of_the_next() -> None:
    run_ranks(_reduce_in_a_thread, 2)
    assert run_ranks(_counts_on_the_main_thread_alone, 2) == [True, True]
