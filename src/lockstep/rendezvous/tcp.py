"""A torch store between hosts, which listens on no more addresses than necessary."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch.distributed as dist

from lockstep.errors import RendezvousError, SetupError
from lockstep.log import get_logger, warn_once
from lockstep.rendezvous.meeting import Meeting
from lockstep.rendezvous.waiting import explain_host, looking_for_rank_0, say_who_is_awaited
from lockstep.topology import name_each
from lockstep.torch_private.stores import PrefixStore, Store, TCPStore, serve_tcp_store

__all__ = ["listen", "open_store", "stop_serving"]

_BACKLOG = 4096
_ANY_ADDRESS = "::"
_ANY_ADDRESS_V4 = "0.0.0.0"
_LOCALHOST = ("localhost", "localhost.localdomain", "ip6-localhost")

_MOST_NAMED = 64
_OVER_TORCHS_TIMEOUT_S = 1.0  # so that torch can report by itself why it does not connect

# Stores served by this process until it ends, by pid and port: a forked child's entries belong to its parent.
_servers: dict[tuple[int, int], Store] = {}


def open_store(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: timedelta,
    listener: socket.socket | None = None,
    url: str | None = None,
) -> Store:
    """Meet the other ranks at an address, where rank 0 listens. Collective.

    Rank 0 listens on that address only. It listens on all addresses, and logs that, if `address` is a name that refers
    to the host itself (127.0.1.1, as some systems call themselves), or an address that this host does not have
    (translated on the way), because the others connect to another one.

    Args:
        address: name or address of rank 0's host, the same on all ranks.
        port: where rank 0 listens until its process ends, so that ranks which come again before rank 0 does find it.
        rank: 0 … world_size-1.
        world_size: number of ranks.
        timeout: time until a missing rank is an error; also the timeout of the store.
        listener: on rank 0: the socket that already listens there, from `listen`.
        url: the URL with address and port, for messages; None for MASTER_ADDR and MASTER_PORT.

    Returns:
        An empty store, a different one in every call.

    Raises:
        RendezvousError: the port is taken, or not all came in time; names the missing ranks.
        SetupError: the port is 0, and other ranks need to know it.
    """
    if port == 0 and world_size > 1:
        raise SetupError(
            f"{world_size} ranks would meet at port 0 of {address}, which means any free port, a different one for "
            f"each: set {_setting(url)} to one that is free there, the same for all ranks"
        )
    rendezvous = _Rendezvous(address, port, world_size, timeout, url)
    if rank == 0:
        return rendezvous.admit_all(_serve(address, port, timeout, listener, _setting(url)))
    return rendezvous.join(rank)


def _setting(url: str | None) -> str:
    """The setting that a user changes to get another port."""
    return "MASTER_PORT" if url is None else f"the port in {url} (init_method)"


def stop_serving() -> None:
    """Release the ports, in a process that continues with another job. Local."""
    _servers.clear()


def _serve(address: str, port: int, timeout: timedelta, listener: socket.socket | None, setting: str) -> Store:
    """Rank 0's store at the port: the one that this process already serves there, or a new one.

    Raises:
        RendezvousError: the port is taken by another process, or by another socket of this one.
    """
    key = (os.getpid(), port)
    if key in _servers:
        return _servers[key]
    # If a script later asks torch for a store of this process at the same port, both share torch's.
    try:
        listening = listen(address, port, setting) if listener is None else listener
        server = serve_tcp_store(listening, address, port, timeout, multi_tenant=True)
    except RendezvousError as taken:
        try:
            server = TCPStore(address, port, None, True, timeout, wait_for_workers=False, multi_tenant=True)
        except RuntimeError:
            raise taken from taken.__cause__
    _servers[key] = server
    return server


class _Rendezvous:
    """Ranks that meet at one port: [Note: named rendezvous] in `meeting`.

    They continue with a store whose keys begin with the name.

    Args:
        address: of rank 0's host.
        port: where rank 0 listens.
        world_size: number of ranks.
        timeout: time until a missing rank is an error; also the timeout of the store.
        url: the URL with address and port; None for MASTER_ADDR and MASTER_PORT.
    """

    def __init__(self, address: str, port: int, world_size: int, timeout: timedelta, url: str | None) -> None:
        self._address = address
        self._port = port
        self._world_size = world_size
        self._timeout = timeout
        self._settings = "MASTER_ADDR, MASTER_PORT and WORLD_SIZE" if url is None else "init_method and world_size"
        self._end_s = time.monotonic() + timeout.total_seconds()

    def admit_all(self, server: Store) -> Store:
        """Rank 0's part."""
        server.set_timeout(self._timeout)
        return self._go_on(server, "rank 0", Meeting.admit_all)

    def join(self, rank: int) -> Store:
        """The part of every other rank."""
        who = f"rank {rank} of {self._world_size}"
        try:
            with looking_for_rank_0(rank, self._address, self._place):
                client = self._connect()
        except (RuntimeError, ValueError) as error:
            raise self._lost(error, who, explain_host(self._address) or self._ask) from error
        return self._go_on(client, who, lambda meeting: meeting.join(rank), self._ask)

    def _connect(self) -> Store:
        """Connect in a thread, because torch waits without a deadline for a server that does not respond."""
        found: list[Store | Exception] = []

        def connect() -> None:
            try:
                store = TCPStore(
                    self._address, self._port, None, False, self._timeout, wait_for_workers=False, multi_tenant=True
                )
            except (RuntimeError, ValueError) as error:
                found.append(error)
            else:
                found.append(store)

        thread = threading.Thread(target=connect, name="lockstep-connect", daemon=True)
        thread.start()
        thread.join(self._timeout.total_seconds() + _OVER_TORCHS_TIMEOUT_S)
        client = found[0] if found else RuntimeError("the listener does not respond")
        if isinstance(client, Exception):
            raise client
        return client

    def _go_on(self, store: Store, who: str, agree: Callable[[Meeting], str], ask: str = "") -> Store:
        remaining_s = self._end_s - time.monotonic()
        meeting = Meeting(
            PrefixStore("lockstep", store),
            self._world_size,
            remaining_s,
            self._place,
            self._explain,
            _await_key,
            remind=lambda missing: say_who_is_awaited(missing, self._place),
        )
        try:
            return PrefixStore(f"world{agree(meeting)}", store)
        except RendezvousError:
            raise
        except (RuntimeError, ValueError) as error:
            raise self._lost(error, who, f".{meeting.refusals}" if meeting.refusals else ask) from error

    def _explain(self, missing: Iterable[int]) -> str:
        missing = list(itertools.islice(missing, _MOST_NAMED + 1))
        more = " and others" if len(missing) > _MOST_NAMED else ""
        names = name_each(missing[:_MOST_NAMED]) + more if missing else "rank 0"
        return (
            f"{names} did not come to {self._place}, within {self._timeout.total_seconds():g} s. Did all ranks "
            f"start, with the same {self._settings}?"
        )

    def _lost(self, error: Exception, who: str, why: str = "") -> RendezvousError:
        return RendezvousError(
            f"{who} did not meet the others at {self._place}: {str(error).splitlines()[0].rstrip('.?')}{why}"
        )

    @property
    def _ask(self) -> str:
        return f". Is rank 0 running, and are {self._settings} the same for all ranks?"

    @property
    def _place(self) -> str:
        return f"{self._address}, port {self._port}, where rank 0 listens"


def _await_key(store: Store, key: str, longest_s: float) -> None:
    """Wait until a key exists, at most `longest_s` seconds."""
    with contextlib.suppress(dist.DistStoreError):  # not there yet; a lost connection is another error
        store.wait([key], timedelta(seconds=longest_s))


def listen(address: str, port: int, setting: str = "MASTER_PORT") -> socket.socket:
    """Open a listening socket on an address of this host. Local; see `open_store` for the choice of address.

    Args:
        address: name or address of this host.
        port: 0 for any free port.
        setting: the setting that a user changes to get another port.

    Raises:
        RendezvousError: the port is taken.
    """
    for candidate in _own_addresses(address):
        with contextlib.suppress(_NotHere):
            return _listen_on(candidate, port, setting)
    warn_once(
        get_logger(__name__),
        f"{address} is not an address of {socket.gethostname()} that other hosts can use, so rank 0 listens on all of "
        "its addresses; give an address of this host (MASTER_ADDR, --master-addr) to have it listen there only",
    )
    try:
        return _listen_on(_ANY_ADDRESS, port, setting)
    except _NotHere:  # a host without IPv6
        return _listen_on(_ANY_ADDRESS_V4, port, setting)


class _NotHere(Exception):
    """The host does not have this address."""


def _own_addresses(address: str) -> list[str]:
    """The addresses on which rank 0 should listen; empty if they cannot be determined here."""
    try:
        return [str(ipaddress.ip_address(address))]
    except ValueError:
        pass  # a name
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []
    if any(ipaddress.ip_address(text.partition("%")[0]).is_loopback for text in found):
        # "localhost" is meant literally; the name of a host that refers to itself (127.0.1.1) means another address
        # elsewhere.
        return found if address.lower() in _LOCALHOST else []
    return found[:1]


def _listen_on(address: str, port: int, setting: str) -> socket.socket:
    """Open a listening socket; one that listens on every address accepts IPv4 connections too.

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
        advice = ". If the script starts its ranks itself, start it once, with python"
        raise RendezvousError(
            f"rank 0 cannot listen on port {port} of {socket.gethostname()} ({error.strerror}); set {setting} to one "
            f"that is free, the same for all ranks{advice if multiprocessing.parent_process() else ''}"
        ) from error
    return listener
