"""The torch store in which the launchers of a job meet. One of them holds it; it ends with that launcher."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from lockstep.errors import LaunchError, RendezvousError
from lockstep.launch.hosts.options import HostsConfig
from lockstep.launch.rendezvous import find_free_port
from lockstep.launch.screen import say
from lockstep.rendezvous import tcp
from lockstep.torch_private.stores import PrefixStore, Store, TCPStore, serve_tcp_store

__all__ = ["Place", "PlaceLost"]

_POLL_S = 0.1
_PROBE_TIMEOUT_S = 3.0
_CONNECT_TIMEOUT_S = 30.0
_CONNECT_POLL_S = 0.05
_SILENCE_S = 8
# For a name that nobody knows: names of pods and virtual machines appear when these are ready.
_NAME_PATIENCE_S = 30.0
_STORE_TIMEOUT = timedelta(seconds=30)


class PlaceLost(RendezvousError):
    """The launcher that holds the store is gone, or cannot be reached."""


class Place:
    """A connection to the store; of its own, so that no other thread's call holds it up.

    Args:
        store: the connection, with keys of one job.
        config: where it leads.
        address: how other hosts reach this one.
        is_holder: this launcher holds the store.
    """

    def __init__(self, store: Store, config: HostsConfig, address: str, is_holder: bool) -> None:
        self._store = store
        self._config = config
        self.address = address
        self.is_holder = is_holder

    @classmethod
    def open(cls, config: HostsConfig, check: Callable[[float], None]) -> Place:
        """Hold the store or connect to it, waiting for who holds it.

        Args:
            config: where, and for how long.
            check: waits for so many seconds; raises when the launcher is told to end.

        Raises:
            LaunchError: the port is taken, the address leads nowhere, or nobody holds the store in time.
        """
        is_holder = config.is_holder if config.is_holder is not None else _is_here(config.address)
        if is_holder:
            try:
                return cls(_hold(config), config, config.local_addr or config.address, True)
            except RendezvousError as error:
                # Another launcher of this machine came first, unless this one was told to be it.
                if config.is_holder:
                    raise LaunchError(
                        f"this launcher must listen at {config.place}, where the launchers meet: {error}; end what "
                        "uses the port, or give all launchers another --master-port"
                    ) from None
        own_address = _reach(config, check)
        return cls(_connect(config, check), config, config.local_addr or own_address, False)

    @classmethod
    def spare(cls, config: HostsConfig, address: str) -> Place:
        """A store of this launcher's own, at a free port of this address, that nobody needs as yet.

        Raises:
            LaunchError: no port is free.
        """
        own = replace(config, address=address, port=find_free_port())
        return cls(_hold(own), own, address, True)

    @classmethod
    def attempt(
        cls, config: HostsConfig, address: str, timeout_s: float, check: Callable[[float], None]
    ) -> Place | None:
        """A connection to a store if somebody holds it now.

        Args:
            config: where.
            address: how other hosts reach this one.
            timeout_s: how long to wait for an answer of a host that may be gone.
            check: see `open`.
        """
        try:
            socket.create_connection((config.address, config.port), timeout_s).close()
            return cls(_connect(config, check), config, address, False)
        except (OSError, UnicodeError, LaunchError):
            return None

    @property
    def port(self) -> int:
        """The port of the store."""
        return self._config.port

    def again(self) -> Place:
        """Another connection to the same store."""
        return Place(_connect(self._config, time.sleep), self._config, self.address, False)

    def store(self, prefix: str) -> Store:
        """The store, with keys of its own."""
        return PrefixStore(prefix, self._store)

    def get(self, key: str) -> str | None:
        """A value, or None if there is none."""
        with self._explained():
            return bytes(self._store.get(key)).decode() if self._store.check([key]) else None

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """Values, None where there is none."""
        return [self.get(key) for key in keys]

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        with self._explained():
            self._store.set(key, value)

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Write a value if there is the expected one, "" for none; the value that is there now."""
        with self._explained():
            return bytes(self._store.compare_set(key, expected, value)).decode()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise PlaceLost(
                f"the launcher at {self._config.place}, where the launchers meet, is gone or cannot be reached "
                f"({str(error).splitlines()[0]})"
            ) from None


def _hold(config: HostsConfig) -> Store:
    """Start the store, listening on that address only."""
    listener = tcp.listen(config.address, config.port)
    store = serve_tcp_store(listener, config.address, config.port, None, _STORE_TIMEOUT, wait_for_workers=False)
    return PrefixStore(f"lockstep/{config.run_id}", store)


def _connect(config: HostsConfig, check: Callable[[float], None]) -> Store:
    """A connection, made in a thread: torch waits without a deadline for a server that says nothing.

    Raises:
        LaunchError: what listens there is something else.
    """
    found: list[Store | str] = []

    def connect() -> None:
        try:
            found.append(TCPStore(config.address, config.port, None, False, _STORE_TIMEOUT, wait_for_workers=False))
        except (dist.DistError, RuntimeError) as error:
            found.append(str(error).splitlines()[0])

    deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
    thread = threading.Thread(target=connect, name="lockstep-connect", daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < deadline_s:
        thread.join(_CONNECT_POLL_S)
        check(0.0)
    store = found[0] if found else f"it did not answer within {_CONNECT_TIMEOUT_S:g} s"
    _bound_silence(config.port)
    if isinstance(store, str):
        raise LaunchError(
            f"what listens at {config.place} is no launcher of a job on several hosts ({store}); choose another port, "
            "the same for all launchers"
        )
    return PrefixStore(f"lockstep/{config.run_id}", store)


def _bound_silence(port: int) -> None:
    """Have the kernel give up connections to this port whose other end is silent: a host may be gone without a word.

    torch waits for an answer for as long as the connection stands, which may be a quarter of an hour.
    """
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                with socket.socket(fileno=os.dup(int(entry))) as one:  # options belong to the socket, not to its number
                    _bound_silence_of(one, port)


def _bound_silence_of(one: socket.socket, port: int) -> None:
    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] == port:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S // 2)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)


def _is_here(address: str) -> bool:
    """Whether a name or address is one of this host's."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, target in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind((target[0], 0))
            return True
    return False


def _reach(config: HostsConfig, check: Callable[[float], None]) -> str:
    """Wait until somebody listens there; the address of this host on the way.

    Raises:
        LaunchError: nobody does, or the name leads nowhere.
    """
    start_s = time.monotonic()
    told = False
    while True:
        try:
            with socket.create_connection((config.address, config.port), _PROBE_TIMEOUT_S) as probe:
                return str(probe.getsockname()[0])
        except socket.gaierror as error:
            patience_s = min(config.join_s, _NAME_PATIENCE_S)
            reason = f"the name service does not know {config.address} ({error.strerror})"
            advice = "give an address that every host knows"
        except (OSError, UnicodeError) as error:
            patience_s = config.join_s
            reason = _reason(error)
            advice = "is the launcher of that host started, and can this host reach the port?"
        waited_s = time.monotonic() - start_s
        if waited_s > patience_s:
            raise LaunchError(
                f"this launcher, on {socket.gethostname()}, found nobody at {config.place}, where the launchers meet, "
                f"within {patience_s:g} s: {reason}; {advice}"
            )
        if not told and waited_s > 1.0:
            told = True
            say(f"lockstep: waiting for the launcher at {config.place}: {reason}\n")
        check(_POLL_S)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
        return "nobody listens there"
    return str(error) or type(error).__name__
