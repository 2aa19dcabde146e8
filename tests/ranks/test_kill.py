"""kill -9 at any moment: the other ranks say who died, and nothing is left behind.

The ranks meet in a store of the test's. In the file that they would use otherwise, torch's FileStore, a rank that dies
in the middle of a write leaves half a record, and torch then reads it for ever, whatever its timeout: no error of ours
can come of it, only the launcher's failure summary.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

from failing import wait_until
from killing import WORLD_SIZE, live_until_killed, map_and_unmap, open_and_close
from lockstep.errors import CollectiveError, RankLost, RendezvousError
from lockstep.testing import WorkerDied, limit_s, run_ranks
from lockstep.torch_private.stores import TCPStore

MOMENTS = 6  # for each rank
# From the kill until the others must know, on a quiet machine.
NOTICE_S = 1.0
# A rank that dies before it has shown itself to the others is only missed at the deadline of `init`.
INIT_DEADLINE_S = 2.0


class Killer(threading.Thread):
    """Kills one rank by SIGKILL from outside, a given time after all are there."""

    def __init__(self, folder: Path, victim: int, delay_s: float) -> None:
        super().__init__()
        self._folder, self._victim, self._delay_s = folder, victim, delay_s
        self.killed_at_s = 0.0

    def run(self) -> None:
        wait_until(lambda: len(list(self._folder.glob("pid-*"))) == WORLD_SIZE, "the start", deadline_s=60)
        pid = int(wait_for_text(self._folder / f"pid-{self._victim}"))
        time.sleep(self._delay_s)
        self.killed_at_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)


def wait_for_text(path: Path) -> str:
    wait_until(lambda: path.read_text() != "", f"{path} being written")
    return path.read_text()


def kill_once(folder: Path, victim: int, delay_s: float) -> None:
    """One run with one kill, and everything that must be true of it."""
    folder.mkdir()
    killer = Killer(folder, victim, delay_s)
    killer.start()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    init_deadline_s = limit_s(INIT_DEADLINE_S)
    arguments = (str(folder), store.port, init_deadline_s)
    outcomes = run_ranks(live_until_killed, WORLD_SIZE, *arguments, init=False, expect_errors=True)
    killer.join()
    assert outcomes.pop(victim) == WorkerDied(victim, signal.SIGKILL, 137)
    for error, when_s, before, after in outcomes:
        noticed_s = when_s - killer.killed_at_s
        assert isinstance(error, RuntimeError), "it did not notice"
        assert f"rank {victim}" in str(error), error
        if isinstance(error, RendezvousError):
            assert noticed_s < init_deadline_s + limit_s(2 * NOTICE_S)
        else:
            assert noticed_s < limit_s(NOTICE_S), f"{noticed_s:.2f} s: {error}"
            assert isinstance(error, RankLost) or "RankLost: rank" in str(error), repr(error)
        if isinstance(error, CollectiveError):
            assert error.culprits == (victim,), error
        assert not Counter(after) - Counter(before)  # a thread of earlier tests may have closed some


def leftovers() -> set[str]:
    """Names of ours in the places where shared memory could be left."""
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return {str(path) for folder in folders for path in folder.glob("lockstep-segment-*")}


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.core), *range(1, WORLD_SIZE)])
def test_kill_at_random_moments(victim: int, tmp_path: Path) -> None:
    run_ranks(os.getpid, 1, init=False)  # starts the process that ranks are forked from
    before = leftovers()
    moments = random.Random(victim)
    for number in range(MOMENTS):
        kill_once(tmp_path / str(number), victim, moments.uniform(0.01, 0.2))
    assert leftovers() <= before


def test_kill_while_segments_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a folder for segments, a name may survive its maker, until the next group is made."""
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("LOCKSTEP_SHM_DIR", str(shared))
    moments = random.Random(7)
    for number in range(4):
        kill_once(tmp_path / str(number), 0, moments.uniform(0.003, 0.02))
    run_ranks(dist.barrier, WORLD_SIZE)
    assert list(shared.iterdir()) == []


def test_worlds_leave_no_descriptors_and_threads() -> None:
    for first, last, threads in run_ranks(open_and_close, WORLD_SIZE, init=False):
        assert first == last
        assert not any("memfd" in name or "pidfd" in name for name in last)
        assert threads == 0


def test_worlds_leave_no_memory() -> None:
    for after_two, after_ten in run_ranks(map_and_unmap, WORLD_SIZE, init=False):
        assert after_ten <= after_two
