"""A torch store between hosts, which listens on no more addresses than it must."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch.distributed as dist

from lockstep.errors import RendezvousError, SetupError
from lockstep.log import get_logger, warn_once
from lockstep.secret import Refused, Seals, is_nonce, new_nonce, secret_of_ranks
from lockstep.topology import name_each
from lockstep.torch_private.stores import PrefixStore, Store, TCPStore, find, serve_tcp_store

__all__ = ["listen", "open_store", "stop_serving"]

_BACKLOG = 4096
_ANY_ADDRESS = "::"
_ANY_ADDRESS_V4 = "0.0.0.0"
_LOCALHOST = ("localhost", "localhost.localdomain", "ip6-localhost")

_COMPLETE = "complete"
_LONGEST_COMING = 1024
_MOST_NAMED = 64
_SHORTEST_NAP_S = 0.001
_LONGEST_NAP_S = 0.02
_WRITE_AGAIN_S = 1.0
# Seconds until a rank with another token is an error.
_PATIENCE_S = 10.0

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
        SetupError: the port is 0, and there are others to come to it.
    """
    if port == 0 and world_size > 1:
        raise SetupError(
            f"{world_size} ranks would meet at port 0 of {address}, which is any that is free, and another for each: "
            "set MASTER_PORT to one that is free there, the same for all ranks"
        )
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
    """Ranks that come to one port for one store: [Note: named rendezvous].

    [Note: named rendezvous] A server that stays holds the keys of earlier rendezvous, and everybody who reaches it may
    write there. So each rendezvous has a random name of rank 0's, and nothing that stands there from before is
    believed. A rank comes with a random word; rank 0 answers it with an invitation, sealed over that word, which
    holds the name; the rank signs under a seal that holds the name. When all have signed, rank 0 says so, with the
    words that it has let in, and all go on, with a store whose keys begin with the name. What has no seal of this
    job counts as not there and is removed, and its writer writes again.

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
        self._secret = secret_of_ranks()
        self._refused = _Refusals()

    def admit_all(self, server: Store) -> Store:
        """Rank 0's part: answer ranks that come, and wait until all have signed."""
        server.set_timeout(self._timeout)
        name = new_nonce()
        signed: dict[int, str] = {}
        invited: dict[int, str] = {}
        nap_s = _SHORTEST_NAP_S
        try:
            while len(signed) < self._world_size - 1:
                has_changed = self._let_in(PrefixStore("lockstep", server), name, invited, signed)
                nap_s = _SHORTEST_NAP_S if has_changed else min(2 * nap_s, _LONGEST_NAP_S)
                self._check_deadline(lambda: self._explain(rank for rank in self._others if rank not in signed))
                time.sleep(nap_s)
            meeting = PrefixStore(f"lockstep/meeting{name}", server)
            meeting.set(_COMPLETE, Seals(self._secret, "meeting", name).seal(_COMPLETE, " ".join(signed.values())))
        except RendezvousError:
            raise
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error
        return PrefixStore(f"world{name}", server)

    @property
    def _others(self) -> range:
        return range(1, self._world_size)

    def _let_in(self, store: Store, name: str, invited: dict[int, str], signed: dict[int, str]) -> bool:
        """Answer who has come since the last look, and note who has signed; whether there was any."""
        has_changed = False
        for rank in self._others:
            if time.monotonic() > self._end_s:
                break
            if rank in signed:
                continue
            if self._invite_one(store, name, rank, invited):
                has_changed = True
            if rank not in invited:
                continue
            word = self._find(PrefixStore(f"meeting{name}", store), str(rank), Seals(self._secret, "meeting", name))
            if word is not None:
                signed[rank], has_changed = word, True
        return has_changed

    def _invite_one(self, store: Store, name: str, rank: int, invited: dict[int, str]) -> bool:
        """Answer a rank that has come, and also who comes with another token, which then knows."""
        found = find(store, _coming(rank))
        if found is None:
            return False
        store.delete_key(_coming(rank))
        word, _, sealed = found[:_LONGEST_COMING].decode(errors="replace").partition(" ")
        if not is_nonce(word):
            self._refused.note(_coming(rank), "it has no seal")
            return False
        try:
            Seals(self._secret, "coming", word).open(_coming(rank), sealed)
        except Refused as refused:
            self._refused.note(_coming(rank), str(refused))
        else:
            self._refused.forget(_coming(rank))
            invited[rank] = word
        key = _invitation(word)
        store.set(key, Seals(self._secret, "invitation", word).seal(key, name))
        return True

    def join(self, rank: int) -> Store:
        """The part of every other rank: come, be answered, sign, and wait until all have."""
        try:
            client = TCPStore(
                self._address, self._port, None, False, self._timeout, wait_for_workers=False, multi_tenant=True
            )
            store, word = PrefixStore("lockstep", client), new_nonce()
            coming = f"{word} {Seals(self._secret, 'coming', word).seal(_coming(rank), str(rank))}"
            key, seals = _invitation(word), Seals(self._secret, "invitation", word)
            name = self._wait_for(store, key, seals, lambda: store.set(_coming(rank), coming))
            if not is_nonce(name):
                raise ValueError(f"rank 0 invites to {name[:60]!r}")
            store.delete_key(key)
            seals = Seals(self._secret, "meeting", name)
            meeting, signature = PrefixStore(f"meeting{name}", store), seals.seal(str(rank), word)
            words = self._wait_for(meeting, _COMPLETE, seals, lambda: meeting.set(str(rank), signature))
        except RendezvousError:
            raise
        except (RuntimeError, ValueError) as error:
            raise self._lost(error, f"rank {rank} of {self._world_size}") from error
        if word not in words.split():
            raise RendezvousError(
                f"another process came to {self._place} as rank {rank}; give each process a rank of its own"
            )
        return PrefixStore(f"world{name}", client)

    def _wait_for(self, store: Store, key: str, seals: Seals, write: Callable[[], None]) -> str:
        """What rank 0 writes under a key; this rank writes its own part meanwhile, and again if somebody removes it."""
        while True:
            write()
            time_left = max(self._end_s - time.monotonic(), 0.001)
            with contextlib.suppress(dist.DistStoreError):  # It is not there yet; a lost connection is another error.
                store.wait([key], timedelta(seconds=min(time_left, _WRITE_AGAIN_S)))
            found = self._find(store, key, seals)
            if found is not None:
                return found
            self._check_deadline(self._explain)

    def _find(self, store: Store, key: str, seals: Seals) -> str | None:
        """What a rank of this job wrote under a key; what anybody else wrote is removed."""
        found = find(store, key)
        if found is None:
            return None
        try:
            text = seals.open(key, found.decode(errors="replace"))
        except Refused as refused:
            self._refused.note(key, str(refused))
            store.delete_key(key)
            time.sleep(_SHORTEST_NAP_S)
            return None
        self._refused.forget(key)
        return text

    def _check_deadline(self, explain: Callable[[], str]) -> None:
        if time.monotonic() > self._end_s or self._refused.are_lasting():
            raise RendezvousError(explain())

    def _explain(self, missing: Iterable[int] = ()) -> str:
        missing = list(itertools.islice(missing, _MOST_NAMED + 1))
        more = " and others" if len(missing) > _MOST_NAMED else ""
        names = name_each(missing[:_MOST_NAMED]) + more if missing else "rank 0"
        return (
            f"{names} did not come to {self._place}, within {self._timeout.total_seconds():g} s. Did all ranks "
            f"start, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?{self._refused.text}"
        )

    def _lost(self, error: Exception, who: str = "rank 0") -> RendezvousError:
        return RendezvousError(
            f"{who} did not meet the others at {self._place}: {str(error).splitlines()[0]}{self._refused.text}"
        )

    @property
    def _place(self) -> str:
        return f"{self._address}, port {self._port}, where rank 0 listens"


class _Refusals:
    """What stood in the store that no rank of this job wrote, as far as none has written the true value since."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, float]] = {}  # by key: why, and since when

    def note(self, key: str, why: str) -> None:
        _, since_s = self._found.get(key, ("", time.monotonic()))
        self._found[key] = why, since_s

    def forget(self, key: str) -> None:
        self._found.pop(key, None)

    def are_lasting(self) -> bool:
        """Whether one comes again and again: the rank that should write there has another token."""
        is_other = (since_s for why, since_s in self._found.values() if "another token" in why)
        return any(time.monotonic() - since_s > _PATIENCE_S for since_s in is_other)

    @property
    def text(self) -> str:
        """A sentence on the first, after a blank; empty for none."""
        for key, (why, _) in self._found.items():
            return (
                f" What stood in the store as {key!r} was not written by a rank of this job: {why}. Do all ranks have "
                "the same LOCKSTEP_TOKEN, and the same Lockstep?"
            )
        return ""


def _coming(rank: int) -> str:
    return f"coming/{rank}"


def _invitation(word: str) -> str:
    return f"invitation/{word}"


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
