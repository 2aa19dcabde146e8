"""A torch store between hosts, which listens on no more addresses than it must."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import time
from datetime import timedelta

from lockstep.errors import RendezvousError
from lockstep.log import get_logger, warn_once
from lockstep.topology import name_each
from lockstep.torch_private.stores import PrefixStore, Store, TCPStore, serve_tcp_store

__all__ = ["listen", "open_store", "stop_serving"]

_BACKLOG = 4096
_ANY_ADDRESS = "::"
_ANY_ADDRESS_V4 = "0.0.0.0"
_LOCALHOST = ("localhost", "localhost.localdomain", "ip6-localhost")

_COMPLETE = "complete"

# What this process serves until it ends, by its pid and the port: the server of a forked child stayed in its parent.
_servers: dict[tuple[int, int], Store] = {}


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
        port: where rank 0 listens, until its process ends, so that ranks which come again before rank 0 does find it.
        rank: 0 … world_size-1.
        world_size: number of ranks.
        timeout: until a rank that does not come is an error; also of the store.
        listener: on rank 0: the socket that listens there already, from `listen`.

    Returns:
        An empty store, another one in every call.

    Raises:
        RendezvousError: the port is taken, or not all came in time; names those who did not.
    """
    rendezvous = _Rendezvous(address, port, world_size, timeout)
    if rank == 0:
        return rendezvous.admit_all(_serve(address, port, timeout, listener))
    return rendezvous.join(rank)


def stop_serving() -> None:
    """Let go of the ports, in a process that goes on with another job. Local."""
    _servers.clear()


def _serve(address: str, port: int, timeout: timedelta, listener: socket.socket | None) -> Store:
    """Rank 0's store at the port: the one that this process serves there already, or a new one.

    Raises:
        RendezvousError: the port is taken by another process, or by another kind of socket of this one.
    """
    key = (os.getpid(), port)
    if key in _servers:
        return _servers[key]
    # Who later asks torch for a store of this process at the same port shares it, and this shares torch's.
    try:
        listening = listen(address, port) if listener is None else listener
        server = serve_tcp_store(listening, address, port, timeout, multi_tenant=True)
    except RendezvousError as taken:
        try:
            server = TCPStore(address, port, None, True, timeout, wait_for_workers=False, multi_tenant=True)
        except RuntimeError:
            raise taken from taken.__cause__
    _servers[key] = server
    return server


class _Rendezvous:
    """Ranks that come to one port for one store: [Note: numbered rendezvous].

    [Note: numbered rendezvous] A server that stays holds the keys of earlier rendezvous, and a rank does not know how
    many there were: it may be new, or have missed one that failed. So rank 0 numbers them. It writes the number for
    each rank under a key of that rank; a rank removes its key and signs. When all have signed, rank 0 marks the
    rendezvous as complete, and all go on, with a store whose keys begin with the number. If they do not come in time,
    rank 0 removes the keys, so that no rank that comes later waits for the others in a rendezvous that has failed.

    Args:
        address: of rank 0's host.
        port: where rank 0 listens.
        world_size: number of ranks.
        timeout: until a rank that does not come is an error; also of the store.
    """

    def __init__(self, address: str, port: int, world_size: int, timeout: timedelta) -> None:
        self._address = address
        self._port = port
        self._world_size = world_size
        self._timeout = timeout
        self._end_s = time.monotonic() + timeout.total_seconds()

    def admit_all(self, server: Store) -> Store:
        """Rank 0's part: number the rendezvous, and wait for all ranks."""
        server.set_timeout(self._timeout)
        numbers = PrefixStore("lockstep", server)
        number = str(numbers.add("meetings", 1))
        others = range(1, self._world_size)
        for rank in others:
            numbers.set(_number_key(rank), number)
        try:
            met = self._wait_for_all(server, number, [str(rank) for rank in others])
        except RendezvousError:
            with contextlib.suppress(RuntimeError):
                for rank in others:
                    numbers.delete_key(_number_key(rank))
            raise
        numbers.set(f"meeting{number}/{_COMPLETE}", "1")
        return met

    def join(self, rank: int) -> Store:
        """The part of every other rank: read the number, sign, and wait until all have."""
        try:
            client = TCPStore(
                self._address, self._port, None, False, self._timeout, wait_for_workers=False, multi_tenant=True
            )
            numbers = PrefixStore("lockstep", client)
            numbers.wait([_number_key(rank)], self._time_left())
            number = numbers.get(_number_key(rank)).decode()
            numbers.delete_key(_number_key(rank))
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {rank} of {self._world_size} did not meet the others at {self._address}, port {self._port}, "
                f"where rank 0 listens: {str(error).splitlines()[0]}"
            ) from error
        PrefixStore(f"lockstep/meeting{number}", client).set(str(rank), "here")
        return self._wait_for_all(client, number, [_COMPLETE])

    def _wait_for_all(self, store: Store, number: str, signs: list[str]) -> Store:
        """Wait for what others write into this rendezvous; returns the store to go on with."""
        values = PrefixStore(f"lockstep/meeting{number}", store)
        try:
            values.wait(signs, self._time_left())
        except RuntimeError as error:
            raise RendezvousError(self._explain(error, values)) from error
        return PrefixStore(f"world{number}", store)

    def _explain(self, error: RuntimeError, values: Store) -> str:
        endpoint = f"{self._address}, port {self._port}, where rank 0 listens"
        try:
            missing = name_each(rank for rank in range(1, self._world_size) if not values.check([str(rank)]))
        except RuntimeError:
            return f"the connection to {endpoint}, is lost: {str(error).splitlines()[0]}"
        return (
            f"{missing or 'rank 0'} did not come to {endpoint}, within {self._timeout.total_seconds():g} s. Did all "
            "ranks start, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?"
        )

    def _time_left(self) -> timedelta:
        return timedelta(seconds=max(self._end_s - time.monotonic(), 0.001))


def _number_key(rank: int) -> str:
    return f"invitation/{rank}"


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
