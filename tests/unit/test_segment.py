"""Shared memory: what is made, who may open it, what is left behind. No ranks."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import pickle
import re
import signal
import stat
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.errors import SharedMemoryError
from lockstep.shm.segment import HUGE_PAGE_BYTES, PAGE_BYTES, Segment

pytestmark = pytest.mark.usefixtures("no_directory")


@pytest.fixture
def no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_SHM_DIR", raising=False)


def descriptors() -> set[str]:
    """What the open descriptors of this process are, but for sockets, which threads of other tests may still have."""
    links = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    # One is gone by now: that of the listing itself.
    found = {f"{link.name} {link.readlink()}" for link in links if link.is_symlink()}
    return {descriptor for descriptor in found if " socket:" not in descriptor}


def mappings() -> list[str]:
    gc.collect()
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "lockstep" in line]


def in_child(function: Callable[[], None]) -> None:
    """Run a function in a forked process, which must not raise."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def altered(segment: Segment, **changes: object) -> str:
    """The segment's handle with other values."""
    return json.dumps({**json.loads(segment.handle), **changes})


def test_segment_without_a_folder_has_no_name() -> None:
    before = set(os.listdir("/dev/shm")), descriptors()
    segment = Segment.create(10_000)
    assert segment.size_bytes == 3 * PAGE_BYTES
    (new,) = descriptors() - before[1]
    fd, _, what = new.partition(" ")
    assert what == "/memfd:lockstep (deleted)"
    assert stat.S_IMODE(os.fstat(int(fd)).st_mode) == 0o600
    assert not os.get_inheritable(int(fd))
    assert set(os.listdir("/dev/shm")) == before[0]
    segment.release()
    assert descriptors() == before[1]


def test_segment_in_a_folder_is_private_and_unlinked_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_SHM_DIR", str(tmp_path))
    before = descriptors()
    first, second = Segment.create(100), Segment.create(100)
    names = os.listdir(tmp_path)
    assert len(names) == 2
    for name in names:
        assert re.fullmatch("lockstep-segment-[0-9a-f]{16}", name)
        assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == 0o600
        assert os.stat(tmp_path / name).st_blocks * 512 >= PAGE_BYTES, "its pages are reserved"
    attached = Segment.attach(first.handle)
    for segment in (first, second, attached):
        segment.release()
        segment.release()
    assert os.listdir(tmp_path) == []
    assert descriptors() == before
    attached.memory[64:70] = b"memory"
    assert bytes(first.memory[64:70]) == b"memory", "the memory outlives the file"


def test_memory_is_zeroed_and_shared_between_processes() -> None:
    segment = Segment.create(PAGE_BYTES)
    assert not segment.tensor(64, PAGE_BYTES - 64).any()

    def write() -> None:
        other = Segment.attach(segment.handle)
        other.tensor(64, 8).view(torch.int64).fill_(4711)

    in_child(write)
    assert segment.memory[64:72].cast("q")[0] == 4711


def test_large_segment_is_aligned_to_huge_pages() -> None:
    segment = Segment.create(HUGE_PAGE_BYTES + 1)
    assert segment.size_bytes == 2 * HUGE_PAGE_BYTES
    assert ctypes.addressof(segment._memory) % HUGE_PAGE_BYTES == 0
    segment.release()


def test_memory_stays_mapped_for_the_last_tensor_and_no_longer() -> None:
    before = mappings()
    segment = Segment.create(PAGE_BYTES)
    part = segment.tensor(1024, 16).view(torch.float32)[1:]
    segment.release()
    del segment
    assert len(mappings()) == len(before) + 1
    part.fill_(1.5)
    del part
    assert mappings() == before


@pytest.mark.parametrize(
    ("change", "number", "says"),
    [
        ({"boot_id": "of another host"}, errno.EXDEV, "that of another host.*use gloo or nccl"),
        ({"nonce": "00" * 16}, errno.ESTALE, "does not hold the nonce that was announced"),
        ({"size_bytes": 2 * PAGE_BYTES}, errno.ESTALE, "is not the segment that was announced"),
        ({"fd": 987_654}, errno.ENOENT, "cannot open the shared memory of process.*need one pid namespace"),
        ({"pid": 2**22 + 1}, errno.ENOENT, "cannot open the shared memory of process.*LOCKSTEP_SHM_DIR"),
    ],
)
def test_what_was_not_announced_is_refused(change: dict[str, object], number: int, says: str) -> None:
    segment = Segment.create(PAGE_BYTES)
    before, mapped = descriptors(), mappings()
    with pytest.raises(SharedMemoryError, match=says) as caught:
        Segment.attach(altered(segment, **change))
    assert caught.value.errno == number
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert descriptors() == before
    del caught  # its traceback holds what attach had mapped
    assert mappings() == mapped
    segment.release()


def test_other_kinds_of_files_are_refused_without_waiting(tmp_path: Path) -> None:
    segment = Segment.create(PAGE_BYTES)
    pipe, link, real = tmp_path / "pipe", tmp_path / "link", tmp_path / "real"
    os.mkfifo(pipe)
    real.write_bytes(bytes(PAGE_BYTES))
    link.symlink_to(real)
    with pytest.raises(SharedMemoryError, match="is not the segment"):
        Segment.attach(altered(segment, path=str(pipe)))
    with pytest.raises(SharedMemoryError, match="symbolic links"):
        Segment.attach(altered(segment, path=str(link)))
    segment.release()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_other_users_are_refused(tmp_path: Path) -> None:
    segment = Segment.create(PAGE_BYTES)
    named = Segment.create(PAGE_BYTES, str(tmp_path))
    for parent in (tmp_path, *tmp_path.parents[:-2]):
        parent.chmod(parent.stat().st_mode | 0o055)

    def attach() -> None:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        for one in (segment, named):
            with pytest.raises(SharedMemoryError, match="Permission denied") as caught:
                Segment.attach(one.handle)
            assert caught.value.errno == errno.EACCES

    in_child(attach)
    segment.release()
    named.release()


@pytest.mark.parametrize("where", ["missing", "file", "x" * 300])
def test_folder_that_cannot_be_used(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = descriptors()
    with pytest.raises(SharedMemoryError, match=f"LOCKSTEP_SHM_DIR={tmp_path / where}"):
        Segment.create(100, str(tmp_path / where))
    assert descriptors() == before


def test_file_system_too_small(tiny_tmpfs: Callable[[str], Path]) -> None:
    folder = tiny_tmpfs("64k")
    before = descriptors()
    with pytest.raises(
        SharedMemoryError, match=r"cannot reserve 1.0 MiB of shared memory in .*No space left"
    ) as caught:
        Segment.create(1 << 20, str(folder))
    assert caught.value.errno == errno.ENOSPC
    assert "docker run --shm-size" in str(caught.value)
    assert os.listdir(folder) == []
    assert descriptors() == before
    segment = Segment.create(60_000, str(folder))
    segment.tensor(0, segment.size_bytes).fill_(1)  # no SIGBUS
    segment.release()


def test_orphans_of_killed_processes_are_removed(tmp_path: Path) -> None:
    def die() -> None:
        Segment.create(100, str(tmp_path))
        os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        die()
    os.waitpid(pid, 0)
    (orphan,) = os.listdir(tmp_path)
    (tmp_path / "lockstep-segment-notes.txt").write_text("not ours")
    held = Segment.create(100, str(tmp_path))
    again = Segment.create(100, str(tmp_path))
    names = set(os.listdir(tmp_path))
    assert orphan not in names
    assert len(names) == 3
    assert "lockstep-segment-notes.txt" in names
    Segment.attach(held.handle).release()
    held.release()
    again.release()
