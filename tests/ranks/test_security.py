"""Who may see what a group shares, what it listens on, and that what others write is never run.

What may unpickle at all is read in the source, by tests/unit/test_unpickling.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pickle
import sys
import time
import traceback
import unittest.mock
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import lockstep
from failing import attempt
from lockstep import checkpoint, env
from lockstep.comm.group_setup import BootstrapStore
from lockstep.errors import SharedMemoryError
from lockstep.metrics import Mean, synchronize
from lockstep.rank_zero import on_rank_zero
from lockstep.secret import Seals
from lockstep.shm.segment import Segment
from lockstep.testing import limit_s, run_ranks

NOBODY = 65534

# ---- what is there while a group is used ----------------------------------------------------------------------------


def use_everything(folder: str) -> None:
    """A little of all that sends something to other ranks, except objects."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = lockstep.DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = [(torch.full((3,), float(number)), number % 2) for number in range(10)]
    loss = Mean()
    for inputs, targets in lockstep.DataLoader(samples, batch_size=4, shuffle=True, seed=0):
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(model(inputs), targets)
        value.backward()
        optimizer.step()
        loss.update(value.detach())
    synchronize(loss)
    path = checkpoint.save(folder, {"model": model.state_dict(), "rng": checkpoint.gather_rng()}, step=1)
    model.load_state_dict(checkpoint.load(path)["model"])
    on_rank_zero(lambda: "text")
    group = dist.new_group(list(range(world_size)))
    dist.all_reduce(torch.ones(400_000), group=group)
    lockstep.symmetric_empty(1000)
    sending = dist.isend(torch.ones(100_000), (rank + 1) % world_size)
    dist.recv(torch.zeros(100_000))
    sending.wait()
    dist.monitored_barrier()
    attempt(lambda: dist.all_reduce(torch.ones(1 + rank)))  # each hears what the others passed


def open_sockets() -> list[str]:
    """This process's sockets of the Internet."""
    return [str(one) for one in psutil.Process().net_connections(kind="inet")]


def is_segment(line: str) -> bool:
    """Of /proc/self/maps. What ranks keep for their launcher has a name, in its private folder."""
    return " rw-s " in line and ("/memfd:lockstep" in line or "/lockstep-segment-" in line)


def shared_memory() -> Iterator[tuple[str, os.stat_result]]:
    """Name and file of every piece of our shared memory that this process maps. For root."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        address, *_, name = line.split(maxsplit=5)
        if is_segment(line):
            with contextlib.suppress(FileNotFoundError):  # of an earlier test, and unmapped by now
                yield name, os.stat(f"/proc/self/map_files/{address}")


def look_around(folder: str) -> dict[str, Any]:
    before = set(open_sockets())  # of a store that an earlier test of this process left to the garbage collector
    with lockstep.init():
        use_everything(folder)
        pieces = list(shared_memory()) if os.geteuid() == 0 else []
        return {
            "sockets": [one for one in open_sockets() if one not in before],
            "names": sorted({name for name, _ in pieces}),
            "modes": {stat.st_mode & 0o777 for _, stat in pieces},
            "links": {stat.st_nlink for _, stat in pieces},
            "count": len(pieces),
        }


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_nothing_listens_and_memory_has_no_name(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = tmp_path / "segments"
    segments.mkdir()
    if where == "folder":
        monkeypatch.setenv("LOCKSTEP_SHM_DIR", str(segments))
    for found in run_ranks(look_around, 3, str(tmp_path), init=False):
        assert found["sockets"] == [], "on one host a group needs no network"
        if os.geteuid() == 0:
            assert found["count"] >= 4  # control segments of two groups, slots, a tensor
            assert found["modes"] == {0o600}
            assert found["links"] == {0}
            assert all(name.endswith(" (deleted)") for name in found["names"])
    assert list(segments.iterdir()) == []


def as_nobody(action: Callable[[], object]) -> str:
    """The exception that `action` raises in a process of another user; empty for none."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "the child failed"
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            action()
            said = ""
        except BaseException as error:
            said = "".join(traceback.format_exception_only(error))
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader) as file:
        return file.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_cannot_open_segments(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o011)  # so that the folder is not what keeps them out
    for directory in (None, str(tmp_path)):
        segment = Segment.create(4096, directory)
        said = as_nobody(lambda segment=segment, where=directory: Segment.attach(segment.handle, where))
        assert said.startswith("lockstep.errors.SharedMemoryError: cannot open the shared memory of process "), said
        assert "Permission denied" in said
        Segment.attach(segment.handle, directory).release()
        segment.release()


# ---- what others write is never run ---------------------------------------------------------------------------------


class Bomb:
    """Whoever unpickles it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


def bomb(folder: Path) -> bytes:
    """Protocol 0 is text as well as bytes."""
    return pickle.dumps(Bomb(folder), protocol=0)


def test_bomb_goes_off(tmp_path: Path) -> None:
    pickle.loads(bomb(tmp_path / "went-off"))
    assert (tmp_path / "went-off").exists()


class PoisonedStore(dist.Store):
    """Answers whatever it is asked with the same bytes."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.content = content
        self.num_answers = 0

    def get(self, key: str) -> bytes:
        self.num_answers += 1
        return self.content

    def set(self, key: str, value: object) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        pass

    def add(self, key: str, amount: int) -> int:
        return amount

    def delete_key(self, key: str) -> bool:
        return True


def meet_at(content: bytes) -> None:
    """Rank 1 of two that meet in a store that somebody else has written."""
    store = PoisonedStore(content)
    limit = timedelta(seconds=2)
    try:
        dist.init_process_group("lockstep", store=store, rank=1, world_size=2, timeout=limit)
    finally:
        assert store.num_answers > 0


def test_store_is_not_unpickled(tmp_path: Path) -> None:
    marker = tmp_path / "went-off"
    (error,) = run_ranks(meet_at, 1, bomb(marker), init=False, expect_errors=True)
    assert isinstance(error, Exception)
    assert not isinstance(error, AssertionError)
    assert not marker.exists()


def fail_and_meet_again(folder: str) -> tuple[str, float]:
    """A job whose rank 0 cannot have the memory; then another, with the same token, in whose store that stands, too."""
    os.environ["LOCKSTEP_TOKEN"] = "0123456789abcdef" * 2
    rank, place = env.RANK.get(), Path(folder)
    recorded: list[tuple[str, str]] = []
    real_seal, real_find, real_create = Seals.seal, BootstrapStore.find, Segment.create

    def seal(seals: Seals, key: str, text: str, count: int | None = None) -> str:
        sealed = real_seal(seals, key, text, count)
        if key == "segment" and text:
            recorded.append((key, sealed))
        return sealed

    def lack_memory(*_: object, **__: object) -> Segment:
        raise SharedMemoryError(errno.ENOMEM, "there was no memory yesterday")

    def set_after_the_recording(store: BootstrapStore, key: str, value: str) -> None:
        """Rank 0 lets rank 1 see first what a stranger writes."""
        if key == "segment" and value:
            store._store.set(key, recorded[0][1])
            wait_for(place / "seen")
        store._store.set(key, store._seals.seal(key, value))

    def find(store: BootstrapStore, key: str) -> str | None:
        found = real_find(store, key)
        if key == "segment" and store._store.check([key]):
            (place / "seen").touch()
        return found

    with unittest.mock.patch.object(Seals, "seal", seal):
        with unittest.mock.patch.object(Segment, "create", lack_memory if rank == 0 else real_create):
            said = str(attempt(lambda: begin(place / "yesterday")).error)
        with (
            unittest.mock.patch.object(BootstrapStore, "set", set_after_the_recording),
            unittest.mock.patch.object(BootstrapStore, "find", find),
        ):
            begin(place / "today")
    with lockstep.current_world() or lockstep.init():
        dist.all_reduce(total := torch.ones(1))
        later = dist.new_group([0, 1])
        dist.all_reduce(total, group=later)
    return said, total.item()


def begin(path: Path) -> None:
    lockstep.init("lockstep", store=dist.FileStore(str(path), 2), device="cpu", timeout=limit_s(20))


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + limit_s(10)
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.002)


def test_recording_of_an_earlier_job_fits_no_group(tmp_path: Path) -> None:
    """With one token for both, yesterday's failure ended today's job."""
    zero, one = run_ranks(fail_and_meet_again, 2, str(tmp_path), init=False)
    assert "there was no memory yesterday" in zero[0]
    assert "there was no memory yesterday" in one[0]
    assert (zero[1], one[1]) == (4.0, 4.0)


def poison_memory(content: bytes) -> str:
    """Rank 1 writes over all that the two share, while rank 0 waits for it."""
    dist.all_reduce(torch.ones(100_000))
    dist.barrier()
    if dist.get_rank() == 1:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if is_segment(line):
                start, end = (int(address, 16) for address in line.split()[0].split("-"))
                poison = content * ((end - start) // len(content))
                # Past the words in which ranks count their steps: garbage there only keeps everybody waiting.
                ctypes.memmove(start + 16384, poison, len(poison) - 16384)
        dist.group.WORLD.fail(content.decode())
        return ""
    limit = timedelta(seconds=5)
    caught = attempt(lambda: dist.monitored_barrier(timeout=limit))
    return str(caught.error)


def test_shared_memory_is_not_unpickled(tmp_path: Path) -> None:
    marker = tmp_path / "went-off"
    outcomes = run_ranks(poison_memory, 2, bomb(marker), expect_errors=True)
    assert "mkdir" in str(outcomes[0]), "rank 0 did not read what rank 1 has written"
    assert not marker.exists()


def count_lookups(folder: str) -> tuple[list[str], list[str]]:
    """What pickles have named, while everything but objects was sent; and then of objects."""
    named: list[str] = []
    sys.addaudithook(lambda event, arguments: named.append(str(arguments)) if event == "pickle.find_class" else None)
    with lockstep.init():
        use_everything(folder)
        before = list(named)
        dist.all_gather_object([None] * dist.get_world_size(), Path("a"))
    return before, named[len(before) :]


def test_only_objects_are_unpickled(tmp_path: Path) -> None:
    for before, after in run_ranks(count_lookups, 2, str(tmp_path), init=False):
        assert before == []
        assert len(after) > 0, "it would have been noticed"
