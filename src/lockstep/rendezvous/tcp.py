"""A torch store between hosts, which listens on no more addresses than it must."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

from lockstep.errors import RendezvousError
from lockstep.log import get_logger, warn_once
from lockstep.torch_private.stores import PrefixStore, Store, TCPStore, serve_tcp_store

__all__ = ["listen", "open_brief_store", "open_store"]

_BACKLOG = 4096
_ANY_ADDRESS = "::"
_ANY_ADDRESS_V4 = "0.0.0.0"
_LOCALHOST = ("localhost", "localhost.localdomain", "ip6-localhost")

_stores: dict[tuple[str, int], Store] = {}
_openings: Counter[tuple[str, int]] = Counter()


def open_store(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: timedelta,
    listener: socket.socket | None = None,
) -> Store:
    """Meet the other ranks at an address, where rank 0 listens. Collective.

    Rank 0 listens on that address alone. Only where it is a name that means this host itself (127.0.1.1, as some
    systems call themselves), or an address that this host does not have (one that is translated on the way), it
    listens on all, because the others come to another one, and says so.

    Args:
        address: name or address of rank 0's host, as all ranks know it.
        port: where rank 0 listens, until its process ends.
        rank: 0 … world_size-1.
        world_size: number of ranks.
        timeout: until a rank that does not come is an error; also of the store.
        listener: on rank 0: the socket that listens there already, from `listen`.

    Returns:
        An empty store, another one in every call.

    Raises:
        RendezvousError: the port is taken, or not all came in time.
    """
    endpoint = (address, port)
    if endpoint not in _stores:
        _stores[endpoint] = open_brief_store(address, port, rank, world_size, timeout, listener)
    _openings[endpoint] += 1
    return PrefixStore(f"world{_openings[endpoint]}", _stores[endpoint])


def open_brief_store(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: timedelta,
    listener: socket.socket | None = None,
) -> Store:
    """Like `open_store`, but rank 0 listens only while the store is in use. Collective.

    Raises:
        RendezvousError: the port is taken, or not all came in time.
    """
    if rank == 0 and listener is None:
        listener = listen(address, port)
    try:
        # A script that later asks torch for env:// at the same port shares this listener.
        if listener is not None:
            return serve_tcp_store(listener, address, port, world_size, timeout, multi_tenant=True)
        return TCPStore(address, port, world_size, False, timeout, multi_tenant=True)
    except dist.DistError as error:
        raise RendezvousError(
            f"rank {rank} of {world_size} did not meet the others at {address}, port {port}, where rank 0 listens: "
            f"{str(error).splitlines()[0]}"
        ) from error


def listen(address: str, port: int) -> socket.socket:
    """A listening socket on an address of this host. Local; see `open_store` for which one.

    Args:
        address: name or address of this host.
        port: 0 for any that is free.

    Raises:
        RendezvousError: the port is taken.
    """
    for candidate in _own_addresses(address):
        with contextlib.suppress(_NotHere):
            return _listen_on(candidate, port)
    warn_once(
        get_logger(__name__),
        f"{address} is no address of {socket.gethostname()} that other hosts could know, so rank 0 listens on all of "
        "its addresses; give an address of this host (MASTER_ADDR, --master-addr) to have it listen there only",
    )
    try:
        return _listen_on(_ANY_ADDRESS, port)
    except _NotHere:  # a host without IPv6
        return _listen_on(_ANY_ADDRESS_V4, port)


class _NotHere(Exception):
    """The host does not have this address."""


def _own_addresses(address: str) -> list[str]:
    """The addresses on which rank 0 should listen; none if they are not known here."""
    try:
        return [str(ipaddress.ip_address(address))]
    except ValueError:
        pass  # a name
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []
    if any(ipaddress.ip_address(text.partition("%")[0]).is_loopback for text in found):
        # "localhost" is meant so; the name of a host that leads to itself (127.0.1.1) is another address for others.
        return found if address.lower() in _LOCALHOST else []
    return found[:1]


def _listen_on(address: str, port: int) -> socket.socket:
    """A listening socket; one that listens on every address takes IPv4 connections too.

    Raises:
        RendezvousError: the port is taken.
        _NotHere: this host has no such address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _NotHere from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address == _ANY_ADDRESS:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise _NotHere from error
        raise RendezvousError(
            f"rank 0 cannot listen on port {port} of {socket.gethostname()} ({error.strerror}); set MASTER_PORT to one "
            "that is free, the same for all ranks"
        ) from error
    return listener
