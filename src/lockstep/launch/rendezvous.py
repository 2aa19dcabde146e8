"""What the ranks of one attempt meet at: a private folder, and a free port for torch's env://.

Folder layout::

    events              FIFO: a rank says that it failed, even if it then hangs on its way out
    error-rank<r>.json  why rank r failed (report.py)
    position-rank<r>    where rank r is (lockstep.rank_status): a link to memory that the launcher holds
    store               torch's FileStore, put there by lockstep.init()
    result-rank<r>.pkl, exception-rank<r>.pkl   lockstep.spawn only (payload.py)
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import socket
import tempfile
from pathlib import Path

from lockstep.errors import LaunchError

__all__ = ["Rendezvous", "announce_failure", "find_free_port"]

_EVENTS = "events"
_PORT_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"
_LOWEST_PORT = 10_000
_TRIES = 200
_DIGITS_OF_RANK = 9


class Rendezvous:
    """A private folder (mode 0700), fresh for every attempt and removed at its end.

    Attributes:
        folder: its path.
        events_fd: readable when a rank has announced something.

    Raises:
        LaunchError: no folder can be made where temporary files go.
    """

    def __init__(self) -> None:
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="lockstep-"))
        except OSError as error:
            raise LaunchError(
                f"cannot make a private folder for the ranks to meet ({error}); set TMPDIR to a writable folder"
            ) from error
        try:
            os.mkfifo(self.folder / _EVENTS, 0o600)
            # Open for writing too, so that it never reads as ended when a rank closes it.
            self.events_fd = os.open(self.folder / _EVENTS, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise LaunchError(f"cannot make a FIFO in {self.folder} ({error}); set TMPDIR to another folder") from error

    def read_failures(self) -> list[int]:
        """Ranks that announced a failure since the last call."""
        try:
            text = os.read(self.events_fd, 65536)
        except BlockingIOError:
            return []
        return [int(word) for word in text.split() if word.isdigit() and len(word) <= _DIGITS_OF_RANK]

    def remove(self) -> None:
        """Remove the folder and all that is in it. May be called twice."""
        if self.events_fd >= 0:
            os.close(self.events_fd)
            self.events_fd = -1
        shutil.rmtree(self.folder, ignore_errors=True)


def announce_failure(folder: Path, rank: int) -> None:
    """Called in a rank: say that it failed, without ever waiting for anybody."""
    with contextlib.suppress(OSError):
        fd = os.open(folder / _EVENTS, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fd, f"{rank}\n".encode())
        finally:
            os.close(fd)


def _candidate_ports() -> range:
    """Ports that the kernel does not hand out by itself, so nobody takes ours before rank 0 does."""
    try:
        with open(_PORT_RANGE_FILE, encoding="ascii") as file:
            low, high = (int(word) for word in file.read().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    below, above = range(_LOWEST_PORT, low), range(high + 1, 65536)
    if len(below) >= len(above):
        return below or range(_LOWEST_PORT, 65536)
    return above


def _is_free(port: int) -> bool:
    """Whether a store could listen on `port` of every address; tried by binding, never by listening."""
    return _can_bind(socket.AF_INET, port) and _can_bind(socket.AF_INET6, port)


def _can_bind(family: socket.AddressFamily, port: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(("", port))
    except OSError as error:
        # Any other error means that the host does not have this family at all.
        return error.errno not in (errno.EADDRINUSE, errno.EACCES)
    return True


def find_free_port() -> int:
    """A port on which rank 0 can put torch's store.

    Found by binding and closing, so the launcher never listens, and below the range that the
    kernel hands out to outgoing connections, so that none of those takes it in between.

    Raises:
        LaunchError: no free port in many tries.
    """
    ports = _candidate_ports()
    chooser = random.SystemRandom()
    for _ in range(_TRIES):
        port = chooser.choice(ports)
        if _is_free(port):
            return port
    raise LaunchError(f"no free TCP port found in {ports.start}-{ports.stop - 1}; name one with --master-port")
