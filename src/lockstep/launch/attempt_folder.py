"""The private folder of one attempt, through which its ranks tell the launcher what happens to them.

Folder layout::

    events              FIFO: a rank announces that it failed, and its exit code, even if it then hangs while exiting
    error-rank<r>.json  why rank r failed (report.py)
    errors              a link to the launcher's memory, for reports if the disk is full: a line each
    position-rank<r>    where rank r is (lockstep.rank_status): a link to memory that the launcher holds
    store               a link to the launcher's memory, for torch's FileStore of each lockstep.init(); without
                        it the ranks create files
    result-rank<r>.pkl, exception-rank<r>.pkl   lockstep.spawn only (payload.py)

Long runs outlive folders: cleaners of temporary files either spare folders that are locked, as systemd-tmpfiles does,
or remove them, after which groups can still be created.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import LaunchError

__all__ = ["ERRORS", "AttemptFolder", "announce_failure"]

_EVENTS = "events"
_STORE = "store"
ERRORS = "errors"
_ANNOUNCEMENT = re.compile(r"^(\d{1,9}) (\d{1,3})$", re.ASCII | re.MULTILINE)


class AttemptFolder:
    """A private folder (mode 0700), new for every attempt and removed at its end.

    Args:
        watch: told of its path before it is created, so that it is removed if this process is killed.

    Attributes:
        path: the path of the folder.
        events_fd: readable when a rank has announced something.

    Raises:
        LaunchError: no folder can be created in the directory for temporary files.
    """

    def __init__(self, watch: Callable[[str], None] | None = None) -> None:
        try:
            self.path = Path(tempfile.gettempdir(), f"lockstep-{os.urandom(6).hex()}").absolute()
            if watch is not None:
                watch(str(self.path))
            self.path.mkdir(0o700)
        except OSError as error:
            raise LaunchError(
                f"cannot make a private folder for the ranks ({error}); set TMPDIR to a writable folder"
            ) from error
        try:
            os.mkfifo(self.path / _EVENTS, 0o600)
            # Opened for writing too, so that it never reports end of file when a rank closes it.
            self.events_fd = os.open(self.path / _EVENTS, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._fds = [os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            raise LaunchError(f"cannot make a FIFO in {self.path} ({error}); set TMPDIR to another folder") from error
        import fcntl  # not on Windows, where this package can still be imported

        with contextlib.suppress(OSError):
            fcntl.flock(self._fds[0], fcntl.LOCK_SH | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):
            for name in (_STORE, ERRORS):
                self._fds.append(os.memfd_create(f"lockstep-{name}", os.MFD_CLOEXEC))
                (self.path / name).symlink_to(f"/proc/{os.getpid()}/fd/{self._fds[-1]}")

    def read_failures(self) -> list[tuple[int, int]]:
        """Ranks that announced a failure since the last call, each with the exit code that it will have."""
        try:
            text = os.read(self.events_fd, 65536).decode(errors="replace")
        except BlockingIOError:
            return []
        return [(int(rank), int(code)) for rank, code in _ANNOUNCEMENT.findall(text)]

    def remove(self) -> None:
        """Remove the folder and its contents. May be called twice."""
        if self.events_fd >= 0:
            os.close(self.events_fd)
            self.events_fd = -1
            for fd in self._fds:
                os.close(fd)
        shutil.rmtree(self.path, ignore_errors=True)


def announce_failure(folder: Path, rank: int, code: int) -> None:
    """Called in a rank: announce that it failed and exits with `code`, without blocking."""
    with contextlib.suppress(OSError):
        fd = os.open(folder / _EVENTS, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fd, f"{rank} {code}\n".encode())
        finally:
            os.close(fd)
