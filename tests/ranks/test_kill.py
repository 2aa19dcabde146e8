"""kill -9 at any moment: the other ranks say who died, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lockstep
from failing import wait_until
from lockstep.errors import CollectiveError, RankLost, RendezvousError
from lockstep.testing import WorkerDied, run_ranks

WORLD_SIZE = 3
MOMENTS = 20
# From the kill until the others must know. A rank that dies before it has shown itself to the others is
# only missed at the deadline of `init`.
NOTICE_S = 1.0
INIT_DEADLINE_S = 2.0


def use_everything(round_number: int) -> None:
    """A world from its beginning to its end: collectives of all kinds, a sub-group, a few steps of a model."""
    with lockstep.init(timeout=INIT_DEADLINE_S) as world:
        world.process_group.set_timeout(torch.distributed.default_pg_timeout)
        for numel in (5, 20_000, 200_000):
            tensor = torch.ones(numel)
            works = [dist.all_reduce(tensor, async_op=True), dist.broadcast(tensor, 1, async_op=True)]
            dist.all_gather([torch.empty(numel) for _ in range(WORLD_SIZE)], tensor)
            dist.reduce_scatter(torch.empty(numel), [tensor] * WORLD_SIZE)
            dist.all_to_all_single(torch.empty(3 * WORLD_SIZE), torch.ones(3 * WORLD_SIZE))
            for work in works:
                assert work is not None
                work.wait()
        dist.all_gather_object([None] * WORLD_SIZE, {"round": round_number})
        pair = dist.new_group([0, 1 + round_number % 2])
        if dist.get_rank(pair) >= 0:
            dist.barrier(pair)
        train(lockstep.DistributedDataParallel if round_number % 2 else torch.nn.parallel.DistributedDataParallel)
        torch.manual_seed(round_number)
        dist.all_reduce(lockstep.symmetric_empty(1000))


def train(engine: Callable[..., torch.nn.Module]) -> None:
    model = engine(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()


def descriptors() -> list[str]:
    """What the open descriptors of this process are, apart from pipes to the test."""
    gc.collect()
    links = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    return sorted(str(link.readlink()) for link in links if link.is_symlink())


def live_until_killed(folder: str) -> tuple[BaseException | None, float, list[str], list[str]]:
    """Use worlds one after another until an error comes; it, its time, and the descriptors before and after."""
    before = descriptors()
    Path(folder, f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    wait_until(lambda: len(list(Path(folder).glob("pid-*"))) == WORLD_SIZE, "meeting")
    caught: BaseException | None = None
    try:
        for round_number in range(10_000):
            use_everything(round_number)
    except RuntimeError as error:
        caught = error.with_traceback(None)
        caught.__context__ = caught.__cause__ = None
    when = time.monotonic()
    return caught, when, before, descriptors()


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
    outcomes = run_ranks(live_until_killed, WORLD_SIZE, str(folder), init=False, expect_errors=True)
    killer.join()
    assert outcomes.pop(victim) == WorkerDied(victim, signal.SIGKILL, 137)
    for error, when_s, before, after in outcomes:
        noticed_s = when_s - killer.killed_at_s
        assert isinstance(error, RuntimeError), "it did not notice"
        assert f"rank {victim}" in str(error), error
        if isinstance(error, RendezvousError):
            assert noticed_s < INIT_DEADLINE_S + 2 * NOTICE_S
        else:
            assert noticed_s < NOTICE_S, f"{noticed_s:.2f} s: {error}"
            assert isinstance(error, RankLost) or "RankLost: rank" in str(error), repr(error)
        if isinstance(error, CollectiveError):
            assert error.culprits == (victim,), error
        assert after == before


def leftovers() -> set[str]:
    """Names of ours in the places where something could be left."""
    found = [*Path("/dev/shm").glob("*lockstep*"), *Path(tempfile.gettempdir()).glob("*lockstep*")]
    # The tests' own folders are theirs to remove, and another run of the tests may have some just now.
    return {str(path) for path in found if not path.name.startswith(("lockstep-testing-", "lockstep-conformance-"))}


@pytest.mark.parametrize("victim", range(WORLD_SIZE))
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
    for number in range(6):
        kill_once(tmp_path / str(number), 0, moments.uniform(0.003, 0.02))
    run_ranks(dist.barrier, WORLD_SIZE)
    assert list(shared.iterdir()) == []


def open_and_close() -> tuple[list[str], list[str], int]:
    """Many worlds in one process: descriptors after the first and after the last; threads at the end."""
    use_everything(0)
    use_everything(1)
    first = descriptors()
    for round_number in range(20):
        use_everything(round_number)
    return first, descriptors(), sum(thread.name.startswith("lockstep") for thread in threading.enumerate())


def test_worlds_leave_no_descriptors_and_threads() -> None:
    for first, last, threads in run_ranks(open_and_close, WORLD_SIZE, init=False):
        assert first == last
        assert not any("memfd" in name or "pidfd" in name for name in last)
        assert threads == 0


def map_and_unmap() -> tuple[int, int]:
    """Memory of ours that is mapped after two worlds, and after ten."""
    counts = []
    for rounds in (2, 8):
        for round_number in range(rounds):
            use_everything(round_number)
        gc.collect()
        counts.append(sum("memfd:lockstep" in line for line in Path("/proc/self/maps").read_text().splitlines()))
    return counts[0], counts[1]


def test_worlds_leave_no_memory() -> None:
    for after_two, after_ten in run_ranks(map_and_unmap, WORLD_SIZE, init=False):
        assert after_ten <= after_two
