"""Finds a free port for torch's env://, which rank 0 will use."""

from __future__ import annotations

import errno
import random
import socket

from lockstep.errors import LaunchError

__all__ = ["find_free_port"]

_PORT_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"
_LOWEST_PORT = 10_000
_TRIES = 200


def _candidate_ports() -> range:
    """Ports that the kernel does not assign by itself, so that nobody takes ours before rank 0 does."""
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
    """Whether a store could listen on `port` of every address; tested by binding, without listening."""
    return _can_bind(socket.AF_INET, port) and _can_bind(socket.AF_INET6, port)


def _can_bind(family: socket.AddressFamily, port: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(("", port))
    except OSError as error:
        # Any other error means that the host does not support this family at all.
        return error.errno not in (errno.EADDRINUSE, errno.EACCES)
    return True


def find_free_port() -> int:
    """Find a port on which rank 0 can open torch's store.

    Found by binding and closing, so the launcher never listens, and below the range that the kernel assigns to outgoing
    connections, so that none of those takes it in between.

    Raises:
        LaunchError: no free port after many attempts.
    """
    ports = _candidate_ports()
    chooser = random.SystemRandom()
    for _ in range(_TRIES):
        port = chooser.choice(ports)
        if _is_free(port):
            return port
    raise LaunchError(f"no free TCP port found in {ports.start}-{ports.stop - 1}; name one with --master-port")
