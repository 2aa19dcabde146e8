"""Chooses the network interface through which a host communicates with others, by route and by trying it.

The store, the group's connections and the engines underneath (Gloo, NCCL) listen on the address that is chosen here and
on no other. `GLOO_SOCKET_IFNAME`, or else `NCCL_SOCKET_IFNAME`, decides if set. Otherwise the first candidate is the
interface by which this host reaches MASTER_ADDR, then that of the default route, then the others; loopback only if
there is nothing else. Which of these the other hosts can really reach is determined by connecting to it: each host has
a `ProbeListener` on every candidate. It answers a challenge, so that another machine with the same private address (a
Docker bridge has 172.17.0.1 everywhere) is not mistaken for it.

Without torch. Everything here is local.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep import env
from lockstep.errors import RendezvousError
from lockstep.secret import MAC_BYTES, Secret, secret_of_ranks

__all__ = [
    "Interface",
    "ProbeListener",
    "candidates",
    "interfaces",
    "listen_on",
    "name_for_engines",
    "reachable",
    "source_towards",
]

_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_IF_INET6 = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE = 0x00
# An address for documentation (RFC 5737), which only the default route leads to. Nothing is ever sent there.
_FAR_AWAY = "192.0.2.1"
_ANY_PORT = 9
_NONCE_BYTES = 16
_TRY_S = 3.0
_BETTER_ONE_MAY_FOLLOW_S = 0.2
_POLL_MS = 100
_MAX_TRIES = 256
_MAX_CLIENTS = 4096
_BACKLOG = 1024


@dataclass(frozen=True)
class Interface:
    """An address of this host.

    Attributes:
        name: name of the interface, such as eth0.
        address: IPv4 or IPv6 address, as text.
        is_loopback: whether only this host can reach it.
    """

    name: str
    address: str
    is_loopback: bool


def interfaces() -> list[Interface]:
    """The addresses of the interfaces that are up, without link-local IPv6 addresses."""
    import fcntl  # not on Windows, where this package can be imported

    found: list[Interface] = []
    flags: dict[str, int] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                flags[name] = struct.unpack("16xh", fcntl.ioctl(probe, _SIOCGIFFLAGS, request)[:18])[0]
                if flags[name] & _IFF_UP:
                    address = socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
                    found.append(Interface(name, address, bool(flags[name] & _IFF_LOOPBACK)))
    with contextlib.suppress(OSError):
        for line in _IF_INET6.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if int(scope, 16) == _GLOBAL_SCOPE and flags.get(name, 0) & _IFF_UP:
                found.append(Interface(name, str(ipaddress.IPv6Address(bytes.fromhex(digits))), False))
    return found


def source_towards(address: str) -> str | None:
    """The address of this host from which the kernel would send to `address`; None without a route."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # UDP: sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def candidates(variables: Mapping[str, str], found: Sequence[Interface] | None = None) -> list[Interface]:
    """Addresses on which this host may listen for others, best first.

    Args:
        variables: the environment.
        found: the interfaces to choose from; by default those of `interfaces`.

    Raises:
        RendezvousError: no interface that a variable names is up, or there are none at all.
    """
    present = list(interfaces() if found is None else found)
    for variable in (env.GLOO_SOCKET_IFNAME, env.NCCL_SOCKET_IFNAME):
        wanted = variable.get(variables)
        if wanted is not None:
            chosen = _chosen_by_name(wanted, present)
            if not chosen:
                here = ", ".join(f"{one.name} ({one.address})" for one in present) or "none"
                raise RendezvousError(
                    f"{variable.name}={wanted}, but on {socket.gethostname()} no such interface is up and has an "
                    f"address; there are: {here}"
                )
            return chosen
    sources = [source_towards(_FAR_AWAY)]
    master = env.MASTER_ADDR.get(variables)
    if master is not None:
        sources.insert(0, source_towards(master))
    outward = [one for one in present if not one.is_loopback]
    ranked = sorted(outward, key=lambda one: (_position(one.address, sources), ":" in one.address))
    chosen = ranked or present
    if not chosen:
        raise RendezvousError(f"{socket.gethostname()} has no network interface that is up and has an address")
    return chosen


def _position(address: str, sources: Sequence[str | None]) -> int:
    return sources.index(address) if address in sources else len(sources)


def _chosen_by_name(wanted: str, present: Sequence[Interface]) -> list[Interface]:
    """Interfaces selected by a value for Gloo or NCCL: `eth0`, `eth0,eth1`, `eth` (a prefix), `=eth0`, `^docker`."""
    excludes = wanted.startswith("^")
    exact = wanted.lstrip("^").startswith("=")
    names = [name.strip() for name in wanted.lstrip("^").lstrip("=").split(",") if name.strip()]

    def fits(one: Interface, name: str) -> bool:
        return one.name == name if exact else one.name.startswith(name)

    if excludes:
        return [one for one in present if not one.is_loopback and not any(fits(one, name) for name in names)]
    chosen = [one for name in names for one in present if one.name == name]
    return chosen or [one for name in names for one in present if fits(one, name)]


def name_for_engines(address: str) -> str | None:
    """The interface by which this host reaches `address`, for the variables of Gloo and NCCL; None if unknown.

    On rank 0's host `address` is its own. If the name resolves to 127.0.1.1, as some systems map their own name, the
    route is the loopback interface, which no other host can reach. Then it is the interface of the default route, as
    in `candidates`; loopback only if there is nothing else.
    """
    present = interfaces()
    outward = [one for one in present if not one.is_loopback] or present
    sources = [source_towards(address), source_towards(_FAR_AWAY)]
    return next((one.name for source in sources for one in outward if one.address == source), None)


class ProbeListener:
    """Listens on candidate addresses, and answers challenges, until closed.

    The answer is an HMAC of the challenge, with a key derived from the job's secret and the nonce. All clients are
    served concurrently, each for a few seconds at most.

    Args:
        addresses: the interfaces of this host to listen on.

    Attributes:
        nonce: hex digits that distinguish this listener from any other.
        endpoints: (interface name, address, port) of each listening socket.
    """

    def __init__(self, addresses: Sequence[Interface]) -> None:
        self.nonce = secrets.token_hex(_NONCE_BYTES)
        self.endpoints: list[tuple[str, str, int]] = []
        self._key = _key_of_probe(self.nonce)
        self._listeners: dict[int, socket.socket] = {}
        self._clients: dict[int, tuple[socket.socket, bytes, float]] = {}  # with bytes received so far, and deadline
        self._poll = select.poll()
        for one in addresses:
            with contextlib.suppress(OSError):  # the address was removed since it was listed
                listener = listen_on(one.address)
                listener.setblocking(False)
                self._listeners[listener.fileno()] = listener
                self._poll.register(listener, select.POLLIN)
                self.endpoints.append((one.name, one.address, int(listener.getsockname()[1])))
        self._is_open = True
        self._thread = threading.Thread(target=self._answer, name="lockstep-probe", daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        while self._is_open:
            for descriptor, _ in self._poll.poll(_POLL_MS):
                if descriptor in self._listeners:
                    self._accept(self._listeners[descriptor])
                elif descriptor in self._clients:
                    self._receive(descriptor)
            now_s = time.monotonic()
            for descriptor, (_, _, until_s) in list(self._clients.items()):
                if now_s > until_s or len(self._clients) > _MAX_CLIENTS:
                    self._drop(descriptor)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            client, _ = listener.accept()
            client.setblocking(False)
            self._clients[client.fileno()] = (client, b"", time.monotonic() + _TRY_S)
            self._poll.register(client, select.POLLIN)

    def _receive(self, descriptor: int) -> None:
        client, received, until_s = self._clients[descriptor]
        try:
            piece = client.recv(_NONCE_BYTES - len(received))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            piece = b""
        received += piece
        if piece and len(received) < _NONCE_BYTES:
            self._clients[descriptor] = (client, received, until_s)
            return
        if piece:
            with contextlib.suppress(OSError):
                client.send(self._key.mac(received))
        self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._clients.pop(descriptor)[0].close()

    def close(self) -> None:
        """Stop listening."""
        self._is_open = False
        self._thread.join(_TRY_S)
        for client, _, _ in self._clients.values():
            client.close()
        for listener in self._listeners.values():
            listener.close()


def _key_of_probe(nonce: str) -> Secret:
    return secret_of_ranks().derive("probe", nonce)


def listen_on(address: str) -> socket.socket:
    """A socket that listens on one address of this host and a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class _Try:
    """An attempt to reach one address: connects, sends a challenge and reads the answer, without blocking."""

    def __init__(self, host: int, index: int, nonce: str, address: str, port: int) -> None:
        self.host, self.index = host, index
        self.until_s = time.monotonic() + _TRY_S
        self._nonce = nonce
        self._challenge = secrets.token_bytes(_NONCE_BYTES)
        self._received = b""
        self._is_challenged = False
        self.client = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self.client.setblocking(False)
            self.client.connect_ex((address, port))  # the result is in SO_ERROR later
        except OSError:  # not a valid address
            self.client.close()
            raise

    def go_on(self) -> bool | None:
        """Continue; call it when the socket is ready. Whether the expected listener answered; None if not yet known."""
        try:
            if not self._is_challenged:
                if self.client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    return False
                self.client.send(self._challenge)
                self._is_challenged = True
                return None
            piece = self.client.recv(MAC_BYTES - len(self._received))
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return False
        self._received += piece
        if piece and len(self._received) < MAC_BYTES:
            return None
        return _key_of_probe(self._nonce).has_made(self._received, self._challenge)

    @property
    def awaited(self) -> int:
        """The events that poll must wait for."""
        return select.POLLIN if self._is_challenged else select.POLLOUT


def reachable(listeners: Mapping[int, tuple[str, Sequence[tuple[str, int]]]]) -> dict[int, list[int]]:
    """Which addresses of other hosts can be reached from here. Takes up to 3 s per 256 addresses if some cannot.

    Args:
        listeners: for each host its listener's nonce, and (address, port) of each endpoint.

    Returns:
        For each host, the sorted indices of the endpoints that answered. They are tried concurrently, the first ones
        of all hosts before the second ones. Once each host has one that answered, the others get a moment more.
    """
    found: dict[int, list[int]] = {host: [] for host in listeners}
    untried = deque(
        sorted(
            ((host, index) for host, (_, endpoints) in listeners.items() for index in range(len(endpoints))),
            key=lambda one: one[1],
        )
    )
    tries: dict[int, _Try] = {}
    try:
        while untried or tries:
            while untried and len(tries) < _MAX_TRIES:
                host, index = untried.popleft()
                nonce, endpoints = listeners[host]
                with contextlib.suppress(OSError):
                    one = _Try(host, index, nonce, *endpoints[index])
                    tries[one.client.fileno()] = one
            has_changed = _go_on(tries, found, _BETTER_ONE_MAY_FOLLOW_S if all(found.values()) else _POLL_MS / 1000)
            if not has_changed and all(found.values()):
                break
    finally:
        for one in tries.values():
            one.client.close()
    return {host: sorted(indices) for host, indices in found.items()}


def _go_on(tries: dict[int, _Try], found: dict[int, list[int]], longest_s: float) -> bool:
    """Wait until some attempts can continue; record and remove those that ended. Returns whether any could continue."""
    poll = select.poll()
    for descriptor, one in tries.items():
        poll.register(descriptor, one.awaited)
    ready = {descriptor for descriptor, _ in poll.poll(longest_s * 1000)}
    now_s = time.monotonic()
    for descriptor, one in list(tries.items()):
        answers = one.go_on() if descriptor in ready else None
        if answers:
            found[one.host].append(one.index)
        if answers is not None or now_s > one.until_s:
            tries.pop(descriptor).client.close()
    return bool(ready)
