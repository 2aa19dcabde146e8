"""What the tests of failing collectives share: calls that must fail, and what their errors must say.

The functions here and in the tests run on ranks; asserts on what they return run in the test.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import CollectiveError
from lockstep.testing import limit_s

# From the moment the trouble is there until every waiting rank must have raised, on a quiet machine.
AT_ONCE_S = 1.0
# One that goes through small slots and one that goes through large ones.
SMALL_NUMEL, LARGE_NUMEL = 3, 40_001


@dataclass(frozen=True)
class Caught:
    """How one call ended on one rank.

    Attributes:
        error: what it raised, or None.
        seconds: how long it took.
        pid: of the rank.
    """

    error: BaseException | None
    seconds: float
    pid: int


def attempt(call: Callable[[], Any]) -> Caught:
    """Make a call and keep its error."""
    start = time.monotonic()
    error: BaseException | None = None
    try:
        call()
    except Exception as caught:
        error = caught
    return Caught(error, time.monotonic() - start, os.getpid())


def group_works() -> bool:
    """Whether two all_reduces, through small and large slots, give the right sums."""
    for numel in (SMALL_NUMEL, LARGE_NUMEL, SMALL_NUMEL):
        tensor = torch.arange(numel, dtype=torch.float32) + dist.get_rank()
        dist.all_reduce(tensor)
        world_size = dist.get_world_size()
        expected = torch.arange(numel, dtype=torch.float32) * world_size + world_size * (world_size - 1) / 2
        if not torch.equal(tensor, expected):
            return False
    return True


def line_of(function: Callable[..., Any]) -> str:
    """`test_x.py:12`: where a lambda of one line calls a collective."""
    code = function.__code__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def expect(
    caught: Caught,
    kind: type[CollectiveError],
    culprits: Iterable[int],
    *texts: str,
    within_s: float = AT_ONCE_S,
) -> None:
    """Assert that a call failed, soon, with an error of that kind, those culprits and those texts."""
    assert type(caught.error) is kind, caught
    assert isinstance(caught.error, CollectiveError)
    message = str(caught.error)
    assert caught.error.culprits == tuple(culprits), message
    for text in texts:
        assert text in message, f"{text!r} is not in {message!r}"
    assert caught.seconds < limit_s(within_s), f"{caught.seconds:.2f} s: {message}"


def ranks_named(error: BaseException | None) -> dict[int, int]:
    """The ranks that an error names with host and pid: rank -> pid."""
    return {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d+) \([^(), ]+, pid (\d+)\)", str(error))}


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 10.0) -> None:
    """Poll until a condition holds; the deadline is that of a quiet machine."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > deadline_s and time.monotonic() - start > limit_s(deadline_s):
            raise TimeoutError(f"{what} did not happen within {deadline_s:g} s")
        time.sleep(0.001)


def process_state(pid: int) -> str:
    """The state letter of a process: R, S, T (stopped), Z (dead); X if it is gone altogether."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def is_dead(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    return process_state(pid) in "ZX"


def set_deadline(seconds: float) -> None:
    """Give the default group a deadline after everybody has come; collective."""
    group = dist.group.WORLD
    assert group is not None
    dist.barrier()
    group.set_timeout(timedelta(seconds=seconds))


def pids_of_ranks() -> list[int]:
    """Every rank's pid. Collective."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def kill_self() -> None:
    """kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_self_soon(delay_s: float = 0.05) -> None:
    """kill -9 from another thread, so that it strikes in whatever the caller does next."""
    threading.Timer(delay_s, kill_self).start()
