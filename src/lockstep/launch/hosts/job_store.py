"""The job store: the torch store in which the launchers of a job meet. One of them holds it; it ends with that one.

[Note: refusals] Any process that reaches the port can write into the store. So launchers authenticate their values with
a MAC (`lockstep.secret`), and a value without a MAC of this job counts as absent. Each MAC also covers a nonce, which
the holder has generated, so no value of an earlier job with the same token is accepted: [Note: store nonce]. A launcher
with another token leaves an unsigned join request; the holder only reports it. A launcher that finds a value that was
not written by the job publishes so with a MAC, and the holder of the store warns of it, once, with the addresses of the
clients.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from lockstep.errors import LaunchError, RendezvousError
from lockstep.launch.free_port import find_free_port
from lockstep.launch.hosts.clients import Clients
from lockstep.launch.hosts.options import HostsConfig
from lockstep.launch.hosts.store_nonce import NO_TEXT, NoAnswer, NonceAnswers, ask_for_nonce
from lockstep.launch.screen import say
from lockstep.rendezvous import tcp
from lockstep.secret import Refused, Seals, new_nonce
from lockstep.torch_private.stores import PrefixStore, Store, TCPStore, find, serve_tcp_store

__all__ = ["JobStore", "StoreLost"]

_POLL_S = 0.1
_PROBE_TIMEOUT_S = 3.0
_CONNECT_TIMEOUT_S = 30.0
_CONNECT_POLL_S = 0.05
_SILENCE_S = 8
# For a name that cannot be resolved: names of pods and virtual machines appear only when these are ready.
_NAME_PATIENCE_S = 30.0
_STORE_TIMEOUT = timedelta(seconds=30)
_NONCE, _JOIN_REQUEST, _REFUSAL = "birth", "knock", "refusal"
# Seconds until the store counts as another job's: a foreign process may overwrite the holder's answer.
_PATIENCE_S = 5.0
_LEAST_PATIENCE_S = 1.0
_LONGEST_NAME = 200


class StoreLost(RendezvousError):
    """The launcher that holds the store is gone, or cannot be reached."""


class JobStore:
    """A connection to the store that is not shared between threads, so that no other thread's call delays it.

    Args:
        store: the connection, with the keys of one job.
        config: the endpoint of the store, and the timeouts of the job.
        address: the address by which other hosts reach this one.
        is_holder: whether this launcher holds the store.
        nonce: nonce of this store. See [Note: store nonce].

    Attributes:
        nonce: the nonce of the job. See [Note: refusals].
        address: the address by which other hosts reach this one.
        is_holder: whether this launcher holds the store.
    """

    def __init__(self, store: Store, config: HostsConfig, address: str, is_holder: bool, nonce: str) -> None:
        self._store = store
        self._config = config
        self.nonce = nonce
        self._sealed_nonce = Seals(config.secret, config.run_id, str(config.port)).seal(_NONCE, nonce)
        self._answers: NonceAnswers | None = None
        self._seals = Seals(config.secret, config.run_id, str(config.port), self.nonce)
        self._clients = Clients(config.port) if is_holder else None
        self._has_warned = False
        self._has_shown_warning = False
        self.address = address
        self.is_holder = is_holder

    @classmethod
    def open(cls, config: HostsConfig, check: Callable[[float], None]) -> JobStore:
        """Hold the store or connect to it, waiting for the launcher that holds it.

        Args:
            config: the endpoint of the store, and the time limit.
            check: waits that many seconds; raises when the launcher is told to end.

        Raises:
            LaunchError: the port is taken, the address is invalid, nobody holds the store in time, or its launchers
                have another token.
        """
        if config.is_holder:
            try:
                return cls._holding(config, config.local_addr or config.address)
            except RendezvousError as error:
                raise LaunchError(
                    f"this launcher must listen at {config.endpoint}, where the launchers meet: {error}; free the "
                    "port, or give all launchers another --master-port"
                ) from None
        reached = _reach(config, check, lambda: cls._hold_if_here(config) if config.is_holder is None else None)
        if isinstance(reached, JobStore):
            return reached
        return cls._joining(config, config.local_addr or reached, max(config.join_s, _PATIENCE_S), check)

    @classmethod
    def _hold_if_here(cls, config: HostsConfig) -> JobStore | None:
        """Open the store in this process, if its address is this host's, and no other launcher here came first."""
        if not _is_here(config.address):
            return None
        try:
            return cls._holding(config, config.local_addr or config.address)
        except RendezvousError:
            return None

    @classmethod
    def _holding(cls, config: HostsConfig, address: str) -> JobStore:
        """Open the store in this process, with a new nonce, whatever others have written there since the port is open.

        Raises:
            RendezvousError: the port is taken.
        """
        made = cls(_hold(config), config, address, True, new_nonce())
        made._store.set(_NONCE, made._sealed_nonce)
        made._answers = NonceAnswers(_connect(config, time.sleep), config.secret, config.port, made.nonce)
        return made

    @classmethod
    def _joining(cls, config: HostsConfig, address: str, silence_s: float, check: Callable[[float], None]) -> JobStore:
        """Connect to the store that another launcher holds.

        Raises:
            LaunchError: it is gone, does not answer for that long, or has another token.
        """
        store = _connect(config, check)
        return cls(
            _of_job(store, config), config, address, False, _learn_nonce(store, config, address, silence_s, check)
        )

    @classmethod
    def spare(cls, config: HostsConfig, address: str) -> JobStore:
        """Open a spare store in this launcher, at a free port of this address.

        Raises:
            LaunchError: no port is free.
        """
        return cls._holding(replace(config, address=address, port=find_free_port()), address)

    @classmethod
    def try_connect(
        cls, config: HostsConfig, address: str, timeout_s: float, check: Callable[[float], None]
    ) -> JobStore | None:
        """Connect to a store if a launcher holds it now; None otherwise.

        Args:
            config: the endpoint of the store.
            address: the address by which other hosts reach this one.
            timeout_s: seconds to wait for an answer of a host that may be gone.
            check: see `open`.
        """
        try:
            socket.create_connection((config.address, config.port), timeout_s).close()
            return cls._joining(config, address, max(timeout_s, _LEAST_PATIENCE_S), check)
        except (OSError, UnicodeError, LaunchError):
            return None

    @property
    def port(self) -> int:
        """The port of the store."""
        return self._config.port

    def reconnect(self) -> JobStore:
        """Another connection to the same store."""
        store = _of_job(_connect(self._config, time.sleep), self._config)
        return JobStore(store, self._config, self.address, False, self.nonce)

    def close(self) -> None:
        """Stop answering new launchers. Called by the holder, at the end."""
        if self._answers is not None:
            self._answers.stop()

    def torch_store(self, prefix: str) -> Store:
        """The torch store, with its own keys under a prefix."""
        return PrefixStore(prefix, self._store)

    def raw(self, key: str) -> str:
        """The value under a key, even if a foreign process wrote it; "" if there is none."""
        with self._explained():
            return (find(self._store, key) or b"").decode(errors="replace")

    def seal(self, key: str, value: str, count: int | None = None) -> str:
        """Add a MAC to a value for the store; see `Seals.seal`."""
        return self._seals.seal(key, value, count)

    def open_seal(self, key: str, raw: str) -> tuple[str, int]:
        """Verify a value that a launcher of this job wrote; returns it and its count.

        Raises:
            Refused: no launcher of this job wrote it. The holder is told.
        """
        try:
            return self._seals.open(key, raw), self._seals.count_of(raw)
        except Refused as refused:
            self.note_refusal(key, str(refused))
            raise

    def get(self, key: str) -> str | None:
        """The value that a launcher of this job wrote under a key; None if there is none."""
        raw = self.raw(key)
        if not raw:
            return None
        with contextlib.suppress(Refused):
            return self.open_seal(key, raw)[0]
        return None

    def set(self, key: str, value: str) -> str:
        """Write a value with a MAC; returns it as written."""
        sealed = self._seals.seal(key, value)
        self.put_back(key, sealed)
        return sealed

    def put_back(self, key: str, sealed: str) -> None:
        """Write a value that already has its MAC."""
        with self._explained():
            self._store.set(key, sealed)

    def compare_set(self, key: str, expected: str, sealed: str) -> bool:
        """Write a value with its MAC if the raw one there is as expected ("" for none); returns whether it was.

        A value that is not text cannot be compared, and was not written by a launcher of this job: it is replaced.
        """
        if NO_TEXT in expected:
            self.put_back(key, sealed)
            return True
        with self._explained():
            return bytes(self._store.compare_set(key, expected, sealed)).decode(errors="replace") == sealed

    def put_back_nonce(self) -> None:
        """If a foreign process has overwritten the nonce of the store, report that and rewrite it. By the holder."""
        if self.is_holder and self.raw(_NONCE) != self._sealed_nonce:
            self.note_refusal(_NONCE, "it was another")
            self.put_back(_NONCE, self._sealed_nonce)

    def note_refusal(self, key: str, reason: str) -> None:
        """Publish a refusal, for the holder's warning. See [Note: refusals]."""
        if not self._has_warned:
            self._has_warned = True
            with self._explained():
                self._store.set(_REFUSAL, self._seals.seal(_REFUSAL, f"wrote {key!r} there: {reason}"))

    def watch(self, known: Callable[[], Collection[str]]) -> None:
        """Warn, once, of unauthenticated peers. By the holder; cheap to call often.

        Args:
            known: addresses of the hosts of the job.
        """
        if self._clients is None or self._has_shown_warning:
            return
        self._clients.look()
        what = None
        with contextlib.suppress(Refused):
            if raw := self.raw(_REFUSAL):
                what = self._seals.open(_REFUSAL, raw)
        if what is None and (raw := self.raw(_JOIN_REQUEST)):
            what = _read_join_request(raw)
        if what is not None:
            self._has_shown_warning = True
            strangers = self._clients.strangers({self.address, self._config.address, *known()})
            seen = f"; connected there, from no host of this job: {', '.join(strangers)}" if strangers else ""
            say(
                f"lockstep: warning: a process without this job's token connected to {self._config.endpoint}, where "
                f"the launchers meet, and {what}{seen}. It was rejected, and the job continues\n"
            )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise StoreLost(
                f"the launcher at {self._config.endpoint}, where the launchers meet, is gone or cannot be reached "
                f"({str(error).splitlines()[0]})"
            ) from None


def _hold(config: HostsConfig) -> Store:
    """Start the store, listening on that address only."""
    listener = tcp.listen(config.address, config.port, "the port of --rdzv-endpoint or --master-port")
    return _of_job(serve_tcp_store(listener, config.address, config.port, _STORE_TIMEOUT), config)


def _of_job(store: Store, config: HostsConfig) -> Store:
    """The part of a store that has the keys of this job: launchers of several jobs may use the same port."""
    return PrefixStore(f"lockstep/{config.run_id}", store)


def _learn_nonce(
    store: Store, config: HostsConfig, address: str, silence_s: float, check: Callable[[float], None]
) -> str:
    """Get the nonce of a store from the launcher that holds it. See [Note: store nonce].

    Raises:
        LaunchError: the store does not belong to launchers of this job.
    """
    patience_s = min(silence_s, _PATIENCE_S)
    try:
        return ask_for_nonce(store, config.secret, config.port, silence_s, patience_s, check)
    except NoAnswer as error:
        reason = str(error)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(f"the launcher at {config.endpoint} is gone ({str(error).splitlines()[0]})") from None
    with contextlib.suppress(RuntimeError):
        _of_job(store, config).set(_JOIN_REQUEST, json.dumps({"host": socket.gethostname(), "address": address}))
    raise LaunchError(
        f"this launcher, on {socket.gethostname()}, cannot join the job at {config.endpoint}, where launchers meet: "
        f"{reason}. Give all launchers of a job the same token (--rdzv-conf token_file=PATH, or LOCKSTEP_TOKEN), and "
        "install the same release of Lockstep on all hosts"
    )


def _read_join_request(raw: str) -> str | None:
    """Parse a join request, which any process may have written, into a clause about its author."""
    try:
        found = json.loads(raw[: 2 * _LONGEST_NAME])
        host, address = (str(found[name])[:_LONGEST_NAME] for name in ("host", "address"))
    except (ValueError, KeyError, TypeError, RecursionError):
        return "wrote 'knock' there"
    return f"would take part: a launcher that calls itself {host!r}, at {address!r}"


def _connect(config: HostsConfig, check: Callable[[float], None]) -> Store:
    """Connect in a thread, because torch waits without a deadline for a server that does not respond.

    Raises:
        LaunchError: the server is not a store of launchers.
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
            f"what listens at {config.endpoint} is not the launcher of a multi-host job ({store}); choose another "
            "port, the same for all launchers"
        )
    return store


def _bound_silence(port: int) -> None:
    """Make the kernel drop connections to this port whose other end is silent: a host may vanish without notice.

    torch waits for an answer as long as the connection exists, which may be a quarter of an hour.
    """
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                with socket.socket(fileno=os.dup(int(entry))) as one:  # options belong to the socket, not its number
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


def _reach(config: HostsConfig, check: Callable[[float], None], hold: Callable[[], JobStore | None]) -> str | JobStore:
    """Wait until the port is open; returns the local address on the way there, or the store held here.

    A name may only become valid, for this host or any, after a while: names of pods appear when these are ready.

    Args:
        config: the endpoint of the store, and the time limit.
        check: see `JobStore.open`.
        hold: opens the store if this launcher is to hold it; called before each attempt.

    Raises:
        LaunchError: nothing listens there in time, or the name cannot be resolved.
    """
    start_s = time.monotonic()
    nameless_since_s: float | None = None
    has_said = False
    while True:
        held = hold()
        if held is not None:
            return held
        now_s = time.monotonic()
        try:
            with socket.create_connection((config.address, config.port), _PROBE_TIMEOUT_S) as probe:
                return str(probe.getsockname()[0])
        except socket.gaierror as error:
            nameless_since_s = now_s if nameless_since_s is None else nameless_since_s
            reason = f"the name service does not know {config.address} ({error.strerror})"
            advice = "give an address that every host knows"
        except (OSError, UnicodeError) as error:
            nameless_since_s = None
            reason = _reason(error)
            advice = "is the launcher of that host started, and can this host reach the port?"
        now_s = time.monotonic()
        limits = [(start_s, config.join_s)]
        if nameless_since_s is not None:
            limits.append((nameless_since_s, _NAME_PATIENCE_S))
        for since_s, patience_s in limits:
            if now_s - since_s > patience_s:
                raise LaunchError(
                    f"this launcher, on {socket.gethostname()}, found no other at {config.endpoint}, where the "
                    f"launchers meet, within {patience_s:g} s: {reason}; {advice}"
                )
        if not has_said and now_s - start_s > 1.0:
            has_said = True
            say(f"lockstep: waiting for the launcher at {config.endpoint}: {reason}\n")
        check(_POLL_S)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
        return "nobody listens there"
    return str(error) or type(error).__name__
