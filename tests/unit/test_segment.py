"""Shared memory: what is made, who may open it, what is left behind. No ranks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import os
import pickle
import re
import resource
import signal
import stat
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.errors import SharedMemoryError
from lockstep.shm.segment import HUGE_PAGE_BYTES, PAGE_BYTES, Segment, leave

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


def names_in_shm() -> set[str]:
    """Without those of other programs."""
    return {name for name in os.listdir("/dev/shm") if "lockstep" in name}


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


@pytest.mark.parametrize("folder", [False, True])
def test_whoever_looks_at_a_piece_that_was_left_keeps_its_content(folder: bool, tmp_path: Path) -> None:
    mine = Segment.create(4 * PAGE_BYTES, str(tmp_path) if folder else None)
    peer = Segment.attach(mine.handle, str(tmp_path))
    mine.release()
    pieces = [segment.tensor(PAGE_BYTES, 2 * PAGE_BYTES - 7) for segment in (mine, peer)]
    around = mine.tensor(0, PAGE_BYTES), mine.tensor(3 * PAGE_BYTES, PAGE_BYTES)
    piece, array = pieces[0].fill_(1), pieces[0].numpy()
    for number in range(2, 5):
        new = leave(piece)
        pieces[1].fill_(number)
        assert new.shape == piece.shape
        assert new.unique().tolist() == [number], "the same memory as the peer's"
        assert piece.unique().tolist() == [number - 1]
        assert set(array.tolist()) == {1}
        new[0] = 77
        assert pieces[1][0].item() == 77
        new[0] = number
        piece = new
    assert not around[1].any()
    assert not around[0][64:].any()


def test_pieces_that_were_left_are_unmapped_with_what_looks_at_them() -> None:
    before = mappings()
    segment = Segment.create(4 * PAGE_BYTES)
    segment.release()
    new = leave(leave(segment.tensor(PAGE_BYTES, PAGE_BYTES)))
    assert len(mappings()) > len(before)
    del segment
    assert new.unique().tolist() == [0]
    del new
    assert mappings() == before


def altered(segment: Segment, **changes: object) -> str:
    """The segment's handle with other values."""
    return json.dumps({**json.loads(segment.handle), **changes})


def test_segment_without_a_folder_has_no_name() -> None:
    before = names_in_shm(), descriptors()
    segment = Segment.create(10_000)
    assert segment.size_bytes == 3 * PAGE_BYTES
    (new,) = descriptors() - before[1]
    fd, _, what = new.partition(" ")
    assert what == "/memfd:lockstep (deleted)"
    assert stat.S_IMODE(os.fstat(int(fd)).st_mode) == 0o600
    assert not os.get_inheritable(int(fd))
    assert names_in_shm() <= before[0]
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
    pipe, link, real = (tmp_path / f"lockstep-segment-{digit * 16}" for digit in "012")
    os.mkfifo(pipe)
    real.write_bytes(bytes(PAGE_BYTES))
    link.symlink_to(real)
    with pytest.raises(SharedMemoryError, match="is not the segment"):
        Segment.attach(altered(segment, path=str(pipe)), str(tmp_path))
    with pytest.raises(SharedMemoryError, match="symbolic links"):
        Segment.attach(altered(segment, path=str(link)), str(tmp_path))
    segment.release()


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A reader of a pipe that a handle named was let go, as if its writer had come."""
    segment, pipe = Segment.create(PAGE_BYTES), tmp_path / f"lockstep-segment-{'0' * 16}"
    os.mkfifo(pipe)
    reader = subprocess.Popen([sys.executable, "-c", f"open({str(pipe)!r}).read()"])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            reader.wait(0.3)
        for _ in range(3):
            with pytest.raises(SharedMemoryError, match="is not the segment"):
                Segment.attach(altered(segment, path=str(pipe)), str(tmp_path))
        with pytest.raises(subprocess.TimeoutExpired):
            reader.wait(0.3)
    finally:
        reader.kill()
        reader.wait()
        segment.release()


def forged(path: Path | None, contents: bytes, **changes: object) -> str:
    """A handle that knows size and first bytes of something that is no segment."""
    segment = Segment.create(PAGE_BYTES)
    segment.release()
    nonce = contents[:16].hex()
    return altered(segment, path=path and str(path), size_bytes=len(contents), nonce=nonce, **changes)


def test_handle_cannot_name_any_other_file_of_the_user(tmp_path: Path) -> None:
    """See [Note: forged handles]: it would be mapped, and control words be written into it."""
    contents = b"precious" * (PAGE_BYTES // 8)
    folder, home = tmp_path / "segments", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    script, disguised = home / "train.py", home / "lockstep-segment-0123456789abcdef"
    for path in (script, disguised):
        path.write_bytes(contents)
    for path, directory, says in (
        (script, folder, "is not the name of a segment"),
        (folder / ".." / "home" / "train.py", folder, "is not the name of a segment"),
        (disguised, folder, "cannot open the shared memory"),
        (disguised, None, "LOCKSTEP_SHM_DIR is not set here"),
    ):
        with pytest.raises(SharedMemoryError, match=says):
            Segment.attach(forged(path, contents), directory and str(directory))


def test_handle_cannot_name_a_descriptor_that_is_no_segment(tmp_path: Path) -> None:
    contents = b"precious" * (PAGE_BYTES // 8)
    path = tmp_path / "memfd:lockstep"
    path.write_bytes(contents)
    before = descriptors()
    with path.open("r+b") as file, pytest.raises(SharedMemoryError, match="is not the segment that was announced"):
        Segment.attach(forged(None, contents, fd=file.fileno()))
    with pytest.raises(SharedMemoryError, match="is not the handle of a segment"):
        Segment.attach(forged(None, contents, pid=f"self/root{tmp_path}/home", fd="../train.py"))
    assert descriptors() == before


@pytest.mark.parametrize("handle", ["", "not json", "[]", "{}", "[" * 100_000, "9" * 5000, '{"pid": 1e999}'])
def test_handle_that_is_none_is_named(handle: str) -> None:
    with pytest.raises(
        SharedMemoryError, match="is not the handle of a segment; does another program use the store"
    ) as caught:
        Segment.attach(handle)
    assert caught.value.errno == errno.EINVAL


def test_size_is_what_this_process_works_out() -> None:
    segment = Segment.create(PAGE_BYTES + 1)
    Segment.attach(segment.handle, size_bytes=PAGE_BYTES + 1).release()
    with pytest.raises(SharedMemoryError, match="has 8192 bytes; here it would have 4096"):
        Segment.attach(segment.handle, size_bytes=PAGE_BYTES)
    for size_bytes in (0, -4096, 1 << 62):
        with pytest.raises(SharedMemoryError, match="no segment has"):
            Segment.attach(altered(segment, size_bytes=size_bytes))
    segment.release()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can open what another user owns")
def test_file_of_another_user_is_refused(tmp_path: Path) -> None:
    segment = Segment.create(PAGE_BYTES, str(tmp_path))
    (name,) = os.listdir(tmp_path)
    os.chown(tmp_path / name, 65534, 65534)
    with pytest.raises(SharedMemoryError, match="is not the segment that was announced"):
        Segment.attach(segment.handle, str(tmp_path))
    segment.release()


def test_folder_may_lie_elsewhere_for_the_peer(tmp_path: Path) -> None:
    """As when two containers mount it under different names."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.symlink_to(here)
    segment = Segment.create(PAGE_BYTES, str(here))
    other = Segment.attach(segment.handle, str(there))
    other.memory[100] = 7
    assert segment.memory[100] == 7
    segment.release()
    other.release()


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_out_of_descriptors(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which limit it is, and does not send people looking for containers."""
    if where == "folder":
        monkeypatch.setenv("LOCKSTEP_SHM_DIR", str(tmp_path))
    segment = Segment.create(PAGE_BYTES)

    def exhaust() -> None:
        limit = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        files = []
        with contextlib.suppress(OSError):
            while True:
                files.append(os.open("/dev/null", os.O_RDONLY))
        for action in (lambda: Segment.create(PAGE_BYTES), lambda: Segment.attach(segment.handle)):
            with pytest.raises(SharedMemoryError, match=rf"may have {limit} open.*ulimit -n") as caught:
                action()
            assert caught.value.errno == errno.EMFILE
            assert "container" not in str(caught.value)

    in_child(exhaust)
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
                Segment.attach(one.handle, str(tmp_path))
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


@pytest.mark.parametrize("is_sparse", [False, True])
def test_limit_on_the_size_of_files_is_named(is_sparse: bool) -> None:
    before, limits = descriptors(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(SharedMemoryError, match="ulimit -f"):
            Segment.create(1 << 20, is_sparse=is_sparse)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
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
    Segment.attach(held.handle, str(tmp_path)).release()
    held.release()
    again.release()
