"""A torch store for processes of one host that share a name, but no port.

[Note: rendezvous in a folder] Rank 0 creates a folder of that name, mode 0700, in the directory for temporary files,
and a file in it. The others wait for the file and open it. Every rank signs the file, which is a torch FileStore. When
all have signed, rank 0 marks it as complete and removes file and folder; the ranks continue through their open
descriptors, so nothing is left behind however they end.

* The folder must be a real folder that only this user can enter, because any user can create one of any name in the
  directory for temporary files. It is checked, and then used, through one descriptor.
* A rank continues when its file has been unlinked. If the file was not marked complete, or has another process's
  signature, it was left over from ranks that were killed during their rendezvous, and rank 0 has replaced it: the rank
  looks again. So no rank mistakes an old rendezvous for its own, in whichever order they come.
* A second world in the same process uses the store of the first, with other keys. So a descriptor is never closed:
  torch may open it by its number at any time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

from lockstep.errors import RendezvousError
from lockstep.rendezvous import waiting
from lockstep.topology import name_each
from lockstep.torch_private.stores import FileStore, PrefixStore, Store

__all__ = ["open_store"]

_FILE = "store"
_COMPLETE = "complete"
_POLL_S = 0.01

_stores: dict[str, Store] = {}
_openings: Counter[str] = Counter()


def open_store(name: str, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Meet the other ranks under `name` and share a store with them. Collective; all of them are on this host.

    Args:
        name: a name that only these ranks use at this time.
        rank: 0 … world_size-1.
        world_size: number of ranks.
        timeout: time until a missing rank is an error; also the timeout of the store.

    Returns:
        An empty store, a different one in every call.

    Raises:
        RendezvousError: a rank did not come, or came twice, or the folder cannot be used; names it.
    """
    if name not in _stores:
        path = os.path.join(tempfile.gettempdir(), name)
        deadline = time.monotonic() + timeout.total_seconds()
        _stores[name] = _publish(path, world_size, timeout) if rank == 0 else _join(path, rank, timeout, deadline)
    _openings[name] += 1
    return PrefixStore(f"world{_openings[name]}", _stores[name])


def _publish(path: str, world_size: int, timeout: timedelta) -> Store:
    """Rank 0's part of [Note: rendezvous in a folder]."""
    with contextlib.suppress(FileExistsError), _explained(path, FileExistsError):
        os.mkdir(path, 0o700)
    with _opened(path) as folder:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_FILE, dir_fd=folder)
            with _explained(path):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                store = _store_on(os.open(_FILE, flags, 0o600, dir_fd=folder), timeout)
            _await_signatures(store, path, world_size, timeout)
            store.set(_COMPLETE, "1")
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_FILE, dir_fd=folder)
            with contextlib.suppress(OSError):
                os.rmdir(path)
    return store


def _await_signatures(store: Store, path: str, world_size: int, timeout: timedelta) -> None:
    first_s = min(waiting.SAY_AFTER_S, timeout.total_seconds())
    missing = _missing_after(store, world_size, timedelta(seconds=first_s))
    if missing and first_s < timeout.total_seconds():
        waiting.say_who_is_awaited(missing, path)
        missing = _missing_after(store, world_size, timeout - timedelta(seconds=first_s))
    if missing:
        raise RendezvousError(
            f"{name_each(missing)} did not come within {timeout.total_seconds():g} s of rank 0 (pid {os.getpid()} on "
            f"{socket.gethostname()}). Did all ranks start, with the same folder for temporary files?"
        )


def _missing_after(store: Store, world_size: int, timeout: timedelta) -> list[int]:
    """The ranks that have not signed within that time."""
    try:
        store.wait([_signature(rank) for rank in range(1, world_size)], timeout)
    except RuntimeError:
        return [rank for rank in range(1, world_size) if not store.check([_signature(rank)])]
    return []


def _join(path: str, rank: int, timeout: timedelta, deadline: float) -> Store:
    """The part of every other rank in [Note: rendezvous in a folder]."""
    while True:
        fd = _find(path, rank, timeout, deadline)
        store = _store_on(fd, timeout)
        own, signed_by = str(os.getpid()), _sign(store, rank)
        if signed_by != own and os.path.exists(f"/proc/{signed_by}"):
            raise RendezvousError(
                f"two processes claim to be rank {rank}: this one and pid {signed_by}. Give each process "
                "a different rank"
            )
        while os.fstat(fd).st_nlink > 0:
            _check_deadline(f"the other ranks did not come to {path}", rank, timeout, deadline)
            time.sleep(_POLL_S)
        if signed_by == own and store.check([_COMPLETE]):
            return store


def _find(path: str, rank: int, timeout: timedelta, deadline: float) -> int:
    """Wait for the file that rank 0 creates there; returns its descriptor."""
    while True:
        with contextlib.suppress(FileNotFoundError), _opened(path) as folder, _explained(path, FileNotFoundError):
            return os.open(_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        _check_deadline(f"rank 0, which makes {path}, did not come", rank, timeout, deadline)
        time.sleep(_POLL_S)


def _check_deadline(what: str, rank: int, timeout: timedelta, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise RendezvousError(
            f"rank {rank} waited {timeout.total_seconds():g} s, but {what}. Did all ranks start, on this host and with "
            "the same folder for temporary files?"
        )


def _signature(rank: int) -> str:
    return f"rank{rank}"


def _sign(store: Store, rank: int) -> str:
    """Sign for this rank, unless a process has already done so; returns the pid that has signed."""
    return bytes(store.compare_set(_signature(rank), "", str(os.getpid()))).decode()


def _store_on(fd: int, timeout: timedelta) -> Store:
    # No world size: with it torch removes the file when the last rank leaves, by a name that no longer exists.
    store = FileStore(f"/proc/self/fd/{fd}", -1)
    store.set_timeout(timeout)
    return store


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """Open a folder that belongs to this user alone; yields its descriptor.

    Raises:
        FileNotFoundError: there is none.
        RendezvousError: it belongs to another user, is open to others, or is not a folder.
    """
    with _explained(path, FileNotFoundError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        state = os.fstat(folder)
        if state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) & 0o077:
            raise RendezvousError(
                f"the ranks would meet in {path}, but it belongs to user {state.st_uid} with mode "
                f"{stat.S_IMODE(state.st_mode):04o}, not to user {os.geteuid()} alone. Have it removed, or set TMPDIR "
                "to a folder of your own for all ranks"
            )
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def _explained(path: str, *known: type[OSError]) -> Iterator[None]:
    """Raise OSErrors as ours, except for those that the caller handles."""
    try:
        yield
    except OSError as error:
        if isinstance(error, known):
            raise
        raise RendezvousError(
            f"the ranks cannot meet in {path} ({error.strerror}); set TMPDIR to a folder of your own for all ranks"
        ) from error
