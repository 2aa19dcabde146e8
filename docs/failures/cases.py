"""The failures that every process group should name: what each case does, once for the tests and for the documentation.

Every case runs on three ranks. All meet in one collective; then rank 1, the culprit, does something else than the
other two. `observe` runs a case on one rank and says how it ended there. The tests in
tests/ranks/test_failure_table.py hold the lockstep group to it; `measure.py` runs the same cases on gloo and writes
docs/failures.md.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lockstep

__all__ = ["CASES", "CULPRIT", "WORLD_SIZE", "Case", "Observation", "line_of", "observe", "observe_on_gloo"]

WORLD_SIZE = 3
CULPRIT = 1
# How long a culprit that does nothing waits for the others to be through, whatever they do.
_PATIENCE_S = 30.0


def _ones(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(numel, dtype=dtype)


def _meet() -> None:
    """What all ranks have in common before they part."""
    dist.all_reduce(_ones(2))  # met


def _two_calls(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _reduce_loss() -> None:
    dist.all_reduce(torch.tensor([0.5]))  # loss


def _reduce_count() -> None:
    dist.all_reduce(torch.tensor([32.0]))  # count


def _steps_in_order() -> None:
    _two_calls(_reduce_loss, _reduce_count)
    _two_calls(_reduce_loss, _reduce_count)


def _steps_swapped() -> None:
    _two_calls(_reduce_loss, _reduce_count)
    _two_calls(_reduce_count, _reduce_loss)


def _train(num_steps: int) -> None:
    for _ in range(num_steps):
        dist.all_reduce(_ones(10))  # gradients
    dist.all_gather(list(_ones(WORLD_SIZE).split(1)), _ones(1))  # metrics


_groups: list[Any] = []


def _make_groups() -> None:
    _groups[:] = [dist.new_group(), dist.new_group()]


def _first_group() -> None:
    dist.all_reduce(_ones(3), group=_groups[0])  # first group


def _second_group() -> None:
    dist.all_reduce(_ones(3), group=_groups[1])  # second group


class _Fragile(torch.autograd.Function):
    """Raises in the backward pass of the culprit."""

    @staticmethod
    def forward(_context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == CULPRIT:
            raise ValueError("the gradient has no end")  # raised
        return gradient


def _engine(model: torch.nn.Module) -> torch.nn.Module:
    """Lockstep's engine on a lockstep group; torch's on any other."""
    if dist.get_backend() == "lockstep":
        return lockstep.DistributedDataParallel(model)
    return torch.nn.parallel.DistributedDataParallel(model)


_models: list[torch.nn.Module] = []


def _make_model() -> None:
    _models[:] = [_engine(torch.nn.Linear(3, 2))]


def _go_backward() -> None:
    _Fragile.apply(_models[0](torch.ones(1, 3))).sum().backward()  # backward


def _leave() -> None:
    sys.exit(0)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Case:
    """One way to go wrong.

    Attributes:
        name: for tests.
        title: for people.
        usual: what the other ranks do.
        odd: what the culprit does; None: it only waits until the others are through, and then does as they did.
        error: name of Lockstep's error on every other rank.
        passed: what the error says that the others passed.
        odd_passed: what it says of the culprit.
        line: comment at the end of the line that the others called from.
        odd_line: comment at the end of the culprit's line.
        prepare: what all ranks do before they meet.
        is_at_deadline: nothing happens that could be noticed earlier.
    """

    name: str
    title: str
    usual: Callable[[], object]
    odd: Callable[[], object] | None
    error: str
    passed: str
    odd_passed: str
    line: str
    odd_line: str
    prepare: Callable[[], None] = lambda: None
    is_at_deadline: bool = False


_MISMATCH, _LOST, _TIMEOUT = "CollectiveMismatch", "RankLost", "CollectiveTimeout"
_MET = "all_reduce(float32[2], SUM)"


def _mismatch(name: str, title: str, usual: Callable[[], object], odd: Callable[[], object], *texts: str) -> Case:
    """Both sides call from one line each, which carries the name of the case as a comment."""
    return Case(name, title, usual, odd, _MISMATCH, *texts, line=f"# {name}", odd_line=f"# odd {name}")


CASES = (
    _mismatch(
        "operation",
        "all_reduce against broadcast",
        lambda: dist.all_reduce(_ones(4)),  # operation
        lambda: dist.broadcast(_ones(4), 0),  # odd operation
        "all_reduce(float32[4], SUM)",
        "broadcast(float32[4], root=0)",
    ),
    _mismatch(
        "shape",
        "shapes 1000 and 500",
        lambda: dist.all_reduce(_ones(1000)),  # shape
        lambda: dist.all_reduce(_ones(500)),  # odd shape
        "all_reduce(float32[1000], SUM)",
        "all_reduce(float32[500], SUM)",
    ),
    _mismatch(
        "dtype",
        "float32 and float64",
        lambda: dist.all_reduce(_ones(4)),  # dtype
        lambda: dist.all_reduce(_ones(4, torch.float64)),  # odd dtype
        "all_reduce(float32[4], SUM)",
        "all_reduce(float64[4], SUM)",
    ),
    _mismatch(
        "larger",
        "broadcast from a larger tensor",
        lambda: dist.broadcast(_ones(4), CULPRIT),  # larger
        lambda: dist.broadcast(_ones(40), CULPRIT),  # odd larger
        "broadcast(float32[4], root=1)",
        "broadcast(float32[40], root=1)",
    ),
    _mismatch(
        "smaller",
        "broadcast from a smaller tensor",
        lambda: dist.broadcast(_ones(40), CULPRIT),  # smaller
        lambda: dist.broadcast(_ones(4), CULPRIT),  # odd smaller
        "broadcast(float32[40], root=1)",
        "broadcast(float32[4], root=1)",
    ),
    _mismatch(
        "same bytes",
        "float32 and int32, the same number of bytes",
        lambda: dist.all_reduce(_ones(4)),  # same bytes
        lambda: dist.all_reduce(_ones(4, torch.int32)),  # odd same bytes
        "all_reduce(float32[4], SUM)",
        "all_reduce(int32[4], SUM)",
    ),
    _mismatch(
        "reduce op",
        "SUM against MAX",
        lambda: dist.all_reduce(_ones(4)),  # reduce op
        lambda: dist.all_reduce(_ones(4), dist.ReduceOp.MAX),  # odd reduce op
        "all_reduce(float32[4], SUM)",
        "all_reduce(float32[4], MAX)",
    ),
    _mismatch(
        "ours",
        "lockstep.mean against lockstep.sum",
        lambda: lockstep.mean(_ones(4).sum(), 4),  # ours
        lambda: lockstep.sum(_ones(4).sum()),  # odd ours
        "lockstep.mean (in its all_reduce(float64[3], SUM))",
        "lockstep.sum (in its all_reduce(float64[3], SUM))",
    ),
    Case(
        "swapped",
        "two calls of one shape in swapped order",
        _steps_in_order,
        _steps_swapped,
        _MISMATCH,
        "all_reduce(float32[1], SUM)",
        "all_reduce(float32[1], SUM)",
        line="# count",
        odd_line="# loss",
    ),
    Case(
        "never",
        "one rank never calls",
        lambda: dist.all_reduce(_ones(4)),  # never
        None,
        _TIMEOUT,
        "all_reduce(float32[4], SUM)",
        _MET,
        line="# never",
        odd_line="# met",
        is_at_deadline=True,
    ),
    Case(
        "stopped",
        "one rank is stopped (SIGSTOP)",
        lambda: dist.all_reduce(_ones(4)),  # stopped
        _stop,
        _TIMEOUT,
        "all_reduce(float32[4], SUM)",
        _MET,
        line="# stopped",
        odd_line="# met",
        is_at_deadline=True,
    ),
    Case(
        "killed",
        "one rank is killed (SIGKILL)",
        lambda: dist.all_reduce(_ones(4)),  # killed
        _die,
        _LOST,
        "all_reduce(float32[4], SUM)",
        _MET,
        line="# killed",
        odd_line="# met",
    ),
    Case(
        "backward",
        "one rank raises in its backward pass",
        _go_backward,
        _go_backward,
        _LOST,
        "gradient averaging(1 buckets: float32[32])",
        "raised ValueError: the gradient has no end",
        line="# backward",
        odd_line="# raised",
        prepare=_make_model,
    ),
    Case(
        "exit",
        "one rank calls sys.exit() in the middle of an epoch",
        lambda: dist.all_reduce(_ones(4)),  # exit
        _leave,
        _LOST,
        "all_reduce(float32[4], SUM)",
        _MET,
        line="# exit",
        odd_line="# met",
    ),
    Case(
        "groups",
        "one rank calls two sub-groups in the other order",
        lambda: _two_calls(_first_group, _second_group),
        lambda: _two_calls(_second_group, _first_group),
        _MISMATCH,
        "all_reduce(float32[3], SUM)",
        "all_reduce(float32[3], SUM)",
        line="# first group",
        odd_line="# second group",
        prepare=_make_groups,
    ),
    _mismatch(
        "new group",
        "two ranks make a group while one reduces",
        lambda: dist.new_group(),  # new group
        lambda: dist.all_reduce(_ones(4)),  # odd new group
        "new_group([0, 1, 2])",
        "all_reduce(float32[4], SUM)",
    ),
    _mismatch(
        "message",
        "two ranks wait for a message of one that is in a barrier",
        lambda: dist.recv(_ones(4), 1),  # message
        lambda: dist.barrier(),  # odd message
        "recv(float32[4], src=1, tag=0)",
        "barrier()",
    ),
    Case(
        "ahead",
        "one rank is a step ahead",
        lambda: _train(3),
        lambda: _train(2),
        _MISMATCH,
        "all_reduce(float32[10], SUM)",
        "all_gather(float32[1])",
        line="# gradients",
        odd_line="# metrics",
    ),
)


def line_of(comment: str) -> str:
    """`cases.py:81`: the line of this file that ends with a comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"  {comment}"))
    return f"{Path(__file__).name}:{number}"


@dataclass(frozen=True)
class Observation:
    """How a case ended on one rank that lived to tell.

    Attributes:
        rank: the rank.
        pid: of its process.
        host: where it ran.
        error: name of the exception, with its module; empty if it continued as if nothing were wrong.
        message: its text.
        seconds: from the beginning of the case on.
    """

    rank: int
    pid: int
    host: str
    error: str
    message: str
    seconds: float

    def names(self, case: Case, culprit_pid: int) -> dict[str, bool]:
        """Which of the things that one wants to know the message says."""
        text = self.message
        return {
            "rank": re.search(rf"\brank {CULPRIT}\b", text, re.IGNORECASE) is not None,
            "host and pid": self.host in text and f"pid {culprit_pid}" in text,
            "number": re.search(r"#\d+|sequence number ?[:=]? ?\d+|SequenceNumber=\d+", text, re.IGNORECASE)
            is not None,
            "operation": case.passed in text or re.search(r"OpType=\w+|\ball_?reduce\b", text, re.I) is not None,
            "what each passed": case.passed in text and case.odd_passed in text,
            "lines of both": line_of(case.line) in text and line_of(case.odd_line) in text,
        }


def _end_as_a_program(error: BaseException) -> None:
    """What the interpreter does with an exception that nobody caught; does not come back."""
    code = error.code if isinstance(error, SystemExit) else 1
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    os._exit(code if isinstance(code, int) else 0)


def _wait_for_others(folder: Path) -> None:
    """Until they have left their marks."""
    deadline = time.monotonic() + _PATIENCE_S
    while len(list(folder.glob("through-*"))) < WORLD_SIZE - 1 and time.monotonic() < deadline:
        time.sleep(0.005)


def observe(name: str, folder: str, deadline_s: float | None = None) -> Observation:
    """Run a case on this rank. Collective; the culprit may not come back.

    Args:
        name: of the case.
        folder: an empty one for all ranks.
        deadline_s: seconds that the default group waits from here on; None: as long as it does anyway.
    """
    (case,) = (case for case in CASES if case.name == name)
    rank, place = dist.get_rank(), Path(folder)
    case.prepare()
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    _meet()
    if deadline_s is not None:
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(timedelta(seconds=deadline_s))
    is_culprit = rank == CULPRIT
    if is_culprit and case.odd is None:
        _wait_for_others(place)
    call = (case.odd or case.usual) if is_culprit else case.usual
    error: BaseException | None = None
    start = time.monotonic()
    try:
        call()
    except BaseException as caught:
        error = caught
    seconds = time.monotonic() - start
    Path(folder, f"through-{rank}").touch()
    if error is not None and is_culprit and case.error == _LOST:
        _end_as_a_program(error)
    if rank != CULPRIT and case.name == "stopped":
        _wait_for_survivors(place)
    kind = "" if error is None else f"{type(error).__module__}.{type(error).__qualname__}"
    return Observation(rank, os.getpid(), socket.gethostname(), kind, "" if error is None else str(error), seconds)


def _wait_for_survivors(folder: Path) -> None:
    """When all others are through, end the one that is stopped, which nobody else would."""
    _wait_for_others(folder)
    pid = int(Path(folder, f"pid-{CULPRIT}").read_text())
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def observe_on_gloo(name: str, folder: str, timeout_s: float, is_detailed: bool) -> Observation:
    """Run a case on this rank, on a gloo group of its own. Collective; the culprit may not come back.

    Args:
        name: of the case.
        folder: an empty one for all ranks.
        timeout_s: how long the group waits.
        is_detailed: as with TORCH_DISTRIBUTED_DEBUG=DETAIL.
    """
    dist.set_debug_level(dist.DebugLevel.DETAIL if is_detailed else dist.DebugLevel.OFF)
    store = dist.FileStore(f"{folder}/store", WORLD_SIZE)
    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timeout)
    try:
        return observe(name, folder)
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
