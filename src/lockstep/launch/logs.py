"""`--log-dir`: one file per rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from lockstep.errors import LaunchError
from lockstep.launch.screen import say, write_all

__all__ = ["LogFolder"]

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class LogFolder:
    """The files rank<r>.log of a job in one folder. They are emptied when the job starts; later output is appended.

    Args:
        path: the folder; created if missing.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fds: dict[int, int] = {}

    def open(self, ranks: Iterable[int], *, has_begun: bool = False) -> None:
        """Open a file for each of these ranks; files that this job has opened before are continued.

        Args:
            ranks: the ranks of this host.
            has_begun: the job has had ranks before: existing files may be theirs, written by another launcher.

        Raises:
            LaunchError: the folder is not writable.
        """
        is_first = not self._fds
        try:
            os.makedirs(self._path, exist_ok=True)
            for rank in ranks:
                if rank not in self._fds:
                    path = os.path.join(self._path, f"rank{rank}.log")
                    self._fds[rank] = os.open(path, _FLAGS | (0 if has_begun else os.O_TRUNC), 0o666)
        except OSError as error:
            raise LaunchError(f"log_dir {self._path!r} cannot be written: {error}; name another folder") from error
        if is_first:
            say(f"lockstep: output goes to {os.path.join(self._path, 'rank*.log')}, one file per rank\n")

    def fd(self, rank: int) -> int:
        """The descriptor of an opened file."""
        return self._fds[rank]

    def write(self, text: str) -> None:
        """Write a line of the launcher's own into every file."""
        for fd in self._fds.values():
            with contextlib.suppress(OSError):
                write_all(fd, text.encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        """Close all files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
