"""Keeps files that a script writes apart from the user's: each run sees the folders in their original state.

[Note: files kept apart] Files that a run writes in the folders below go into memory, through an overlay file system in
a mount namespace that all its ranks enter. So no checkpoint of the user is overwritten, and no run resumes from files
of another. A *keeper*, a separate process, creates the namespace, and lists the files written once the run is over. If
the system does not allow such a namespace, or a folder contains other mounted file systems, the script's files are
written to disk as usual, with a note.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lockstep import libc

__all__ = ["Keeper", "enter", "folders_of", "kept_apart"]

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_PRIVATE = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC
_BIND = 1 << 12 | 1 << 14  # MS_BIND | MS_REC
_SET_DUMPABLE = 4


def folders_of(target: str, is_module: bool, args: Sequence[str]) -> list[str]:
    """The folders that a script is likely to write to: the current one, its own, those named by its arguments, and the
    folder for temporary files.
    """
    found = [Path.cwd()] if is_module else [Path.cwd(), Path(target).resolve().parent]
    for word in args:
        named = Path(word.rpartition("=")[2]).expanduser()
        if named.is_absolute():
            found.append(named if named.is_dir() else named.parent)
    temporary = Path(tempfile.gettempdir())
    found += [] if _obstacle(os.path.realpath(temporary)) else [temporary]
    real = {os.path.realpath(each) for each in found if each.is_dir()}
    return sorted(each for each in real if not any(_is_inside(each, other) for other in real - {each}))


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _obstacle(folder: str) -> str:
    """Why a folder cannot be covered; empty if it can."""
    if set(folder) & set(":,\\"):
        return f"the name of {folder} has a character that separates mount options"
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    inside = [each for each in mounts if each != folder and _is_inside(each, folder)]
    return f"{folder} contains another file system, {inside[0]}" if inside else ""


@dataclass
class Keeper:
    """The owner of one run's namespace.

    Attributes:
        pid: pid of the keeper; 0 if there is none.
        why: why files are not kept apart; empty if they are.
        written: paths of files that the run has written or removed, once it is over.
    """

    pid: int = 0
    why: str = ""
    written: list[str] = field(default_factory=list)


@contextlib.contextmanager
def kept_apart(folders: Sequence[str], memory: Path) -> Iterator[Keeper]:
    """Context manager within which processes can `enter` the keeper's namespace. See [Note: files kept apart].

    Args:
        folders: real paths, none inside another.
        memory: a folder to create, whose content only the keeper and processes that enter see; its siblings are shared.
    """
    keeper = Keeper()
    keeper.why = next((why for why in map(_obstacle, folders) if why), "")
    if keeper.why:
        yield keeper
        return
    (answer, to_parent), (from_parent, end) = os.pipe(), os.pipe()
    keeper.pid = pid = os.fork()
    if pid == 0:
        os.close(answer)
        os.close(end)
        _keep(folders, memory, to_parent, from_parent)
    os.close(to_parent)
    os.close(from_parent)
    with os.fdopen(answer, encoding="utf-8") as lines:
        try:
            keeper.why = json.loads(lines.readline() or '"its keeper died"')
            keeper.pid = 0 if keeper.why else pid
            yield keeper
        finally:
            os.close(end)
            keeper.written = json.loads(lines.readline() or "[]")
            os.waitpid(pid, 0)


def _keep(folders: Sequence[str], memory: Path, to_parent: int, from_parent: int) -> NoReturn:
    """The keeper process: covers the folders, waits for the run to end, and lists the files written."""
    try:
        with os.fdopen(to_parent, "w", encoding="utf-8") as lines:
            with contextlib.suppress(OSError):
                libc.die_with_parent()
            try:
                uppers, why = _cover(folders, memory), ""
            except OSError as error:
                uppers, why = {}, f"overlays are not allowed here ({error})"
            print(json.dumps(why), file=lines, flush=True)
            os.read(from_parent, 1)
            print(json.dumps(_changed(uppers)), file=lines, flush=True)
    finally:
        os._exit(0)


def _cover(folders: Sequence[str], memory: Path) -> dict[str, str]:
    """Mount an overlay on each folder in a new namespace; returns folder -> directory with the files written."""
    user, group = os.getuid(), os.getgid()
    options = ""
    if libc.call("unshare", _NEW_MOUNTS) != 0:
        _call("unshare", _NEW_USER | _NEW_MOUNTS)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text)
        options = ",userxattr"
    _call("mount", b"none", b"/", None, _PRIVATE, None)
    memory.mkdir()
    _call("mount", b"tmpfs", bytes(memory), b"tmpfs", 0, None)
    shared = os.open(memory.parent, os.O_PATH)
    uppers = {folder: f"{memory}/upper{number}" for number, folder in enumerate(folders)}
    for number, (folder, upper) in enumerate(uppers.items()):
        work = f"{memory}/work{number}"
        os.mkdir(upper)
        os.mkdir(work)
        os.chmod(upper, stat.S_IMODE(os.stat(folder).st_mode))
        places = f"lowerdir={folder},upperdir={upper},workdir={work}{options}"
        _call("mount", b"overlay", os.fsencode(folder), b"overlay", 0, places.encode())
        if _is_inside(os.path.realpath(memory), folder):
            _call("mount", b"/proc/self/fd/%d" % shared, bytes(memory.parent), None, _BIND, None)
    return uppers


def _call(name: str, *values: Any) -> None:
    if libc.call(name, *values) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _changed(uppers: dict[str, str]) -> list[str]:
    found = []
    for folder, upper in uppers.items():
        for place, _, names in os.walk(upper):
            if os.path.basename(place) != "__pycache__":
                found += [os.path.join(folder, os.path.relpath(place, upper), name) for name in names]
    return sorted(map(os.path.normpath, found))


def enter(pid: int) -> None:
    """Enter the keeper's view of files, permanently. For a process with one thread.

    Raises:
        OSError: the system refuses.
    """
    here = os.getcwd()
    for kind, flag in (("user", _NEW_USER), ("mnt", _NEW_MOUNTS)):
        if os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"):
            descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
            try:
                _call("setns", descriptor, flag)
            finally:
                os.close(descriptor)
    os.chdir(here)
    # A change of namespace resets both: that ranks may read each other's memory, and that they die with their parent.
    libc.call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)
    libc.die_with_parent()
