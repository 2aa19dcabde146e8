"""Keeps unauthenticated peers from the port on which Gloo listens.

[Note: Gloo's port] Gloo accepts any process that connects and sends the number of a pair; the numbers count from 0. It
keeps every other connection open, and when no descriptor is left for the next one, an exception kills the process
(SIGABRT). It listens as long as the group exists, though nobody needs to connect once all ranks have. So a kernel
packet filter protects the listening socket: while the ranks connect, it passes packets from the addresses of their
hosts, afterwards none. Existing connections are not affected. If the kernel does not support such filters, the port
stays open.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
import struct
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from lockstep.torch_private.groups import gloo_device

__all__ = ["GlooPortFilter"]

_SO_ATTACH_FILTER = 26
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # of the kernel's packet filter
_WHOLE_PACKET = 0xFFFFFFFF
_NETWORK_HEADER = 0xFFF00000  # base of the kernel's offsets from the start of the IP header
_SOURCE_V4, _SOURCE_V6 = 12, 8  # offsets of the source address in that header
_INSTRUCTION = struct.Struct("=HBBI")

_making = threading.Lock()


class GlooPortFilter:
    """A Gloo device whose listening port only admits certain addresses. See [Note: Gloo's port]. Local.

    Args:
        address: address of this host, the only one on which Gloo listens and from which it connects.
        admitted: addresses of all hosts of the group, from which its ranks may connect; None for any.

    Attributes:
        device: for `gloo_group`.
    """

    def __init__(self, address: str, admitted: Collection[str] | None) -> None:
        with _making:  # so that the sockets of two devices are not confused
            before = _sockets()
            self.device: Any = gloo_device(address)
            made = _sockets()
            self._listeners = [made[key] for key in made.keys() - before.keys() if _listens_at(made[key], address)]
        if admitted is not None:
            self._filter(_from_only(admitted, ":" in address))

    def close(self) -> None:
        """Refuse all further connections, once all ranks have connected. Call it before the device is destroyed."""
        self._filter([(_RETURN, 0, 0, 0)])

    def _filter(self, program: list[tuple[int, int, int, int]]) -> None:
        code = b"".join(_INSTRUCTION.pack(*one) for one in program)
        memory = ctypes.create_string_buffer(code, len(code))
        option = struct.pack("HP", len(program), ctypes.addressof(memory))
        for listener in self._listeners:
            # More addresses than the kernel takes, or a kernel without filters.
            with contextlib.suppress(OSError), _borrowed(listener) as one:
                one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


def _sockets() -> dict[str, int]:
    """The descriptors of this process's sockets, by the name of the socket in /proc."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                found[os.readlink(f"/proc/self/fd/{entry}")] = int(entry)
    return found


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A socket object for a descriptor that belongs to others; does not close it."""
    one = socket.socket(fileno=descriptor)
    try:
        yield one
    finally:
        one.detach()


def _listens_at(descriptor: int, address: str) -> bool:
    with contextlib.suppress(OSError, ValueError), _borrowed(descriptor) as one:
        is_listener = bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        return is_listener and ipaddress.ip_address(one.getsockname()[0]) == ipaddress.ip_address(address)
    return False


def _from_only(addresses: Iterable[str], is_v6: bool) -> list[tuple[int, int, int, int]]:
    """A filter that passes IP packets from these addresses, as (code, jump if true, jump if false, value) per step."""
    program: list[tuple[int, int, int, int]] = []
    numbers = {ipaddress.ip_address(one.partition("%")[0]) for one in addresses}
    words = [struct.unpack(f"!{len(one.packed) // 4}I", one.packed) for one in numbers if (one.version == 6) == is_v6]
    start = _NETWORK_HEADER + (_SOURCE_V6 if is_v6 else _SOURCE_V4)
    for one in sorted(words):
        for index, word in enumerate(one):
            rest = len(one) - index - 1  # words that follow, two instructions each
            program += [(_LOAD_WORD, 0, 0, start + 4 * index), (_JUMP_IF_EQUAL, 0, 2 * rest + 1, word)]
        program.append((_RETURN, 0, 0, _WHOLE_PACKET))
    return [*program, (_RETURN, 0, 0, 0)]
