"""Records which addresses connect to the job store's port, to name unauthenticated peers in a warning. No torch.

torch's store does not tell which client wrote a value. But the kernel knows the clients, so the launcher that holds the
store checks regularly, and can name, once a value was rejected, the addresses that do not belong to a host of the job.
"""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Collection
from pathlib import Path

__all__ = ["Clients", "connected_to", "is_loopback"]

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LISTENS = "0A"
_MAPPED = b"\0" * 10 + b"\xff\xff"
_SHARE_OF_TIME = 0.01
_MOST_ADDRESSES = 256


def is_loopback(address: str) -> bool:
    """Whether only this host can reach that address or name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _address(digits: str) -> str:
    """Parse an address of the kernel's tables: 32-bit words in the machine's byte order."""
    words = bytes.fromhex(digits)
    data = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
    return str(ipaddress.ip_address(data[12:] if data.startswith(_MAPPED) else data))


def connected_to(port: int) -> set[str]:
    """Addresses of the clients of a port of this host."""
    found: set[str] = set()
    for table in _TABLES:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, remote, state, *_ = line.split()
                if int(local.rpartition(":")[2], 16) == port and state != _LISTENS:
                    found.add(_address(remote.rpartition(":")[0]))
    return found


class Clients:
    """Records the clients of a port.

    Args:
        port: a port of this host.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._seen: dict[str, None] = {}
        self._next_s = 0.0

    def look(self) -> None:
        """Record the current clients. Cheap to call often: on a host with many connections it checks more rarely."""
        if time.monotonic() >= self._next_s:
            self._look()

    def _look(self) -> None:
        start_s = time.monotonic()
        for address in connected_to(self._port):
            if len(self._seen) < _MOST_ADDRESSES:
                self._seen[address] = None
        self._next_s = start_s + (time.monotonic() - start_s) / _SHARE_OF_TIME

    def strangers(self, known: Collection[str]) -> list[str]:
        """The clients seen so far, except for the known addresses."""
        self._look()
        return [address for address in self._seen if address not in known]
