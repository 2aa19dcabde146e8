"""Listens for the other ranks of a new group over several hosts, and connects to them.

A rank listens, on the chosen address of its host and a free port, only while the group is being created: once all ranks
are connected there is no listening port. A process that connects has to authenticate itself (`handshake.py`).

[Note: strangers] All handshakes run at the same time, each with its own deadline. So an unauthenticated peer that
connects and sends nothing, or single bytes, delays no rank. Its connection is closed in the end, with one warning.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping

from lockstep.comm.hosts.handshake import IncomingHandshake, OutgoingHandshake, Stranger
from lockstep.comm.hosts.links import Links
from lockstep.errors import RendezvousError
from lockstep.log import get_logger, warn_once
from lockstep.network_interfaces import listen_on
from lockstep.secret import Secret, secret_of_ranks

__all__ = ["PeerListener"]

_NONCE_BYTES = 16
_POLL_MS = 50
_MOST_STRANGERS = 64

_Endpoint = tuple[str, int, str]


class PeerListener:
    """Listens until all other ranks of a new group have connected to this one.

    Args:
        address: address of this host.
        secret: the secret of the job; default that of the environment.

    Attributes:
        endpoint: what the other ranks need to know, for the caller to publish: address, port and nonce.
    """

    def __init__(self, address: str, secret: Secret | None = None) -> None:
        nonce = secrets.token_hex(_NONCE_BYTES)
        self._secret = secret_of_ranks() if secret is None else secret
        self._key = self._secret.derive("handshake", nonce)
        self._listener = listen_on(address)
        self._listener.setblocking(False)
        self.endpoint: _Endpoint = (address, int(self._listener.getsockname()[1]), nonce)

    def connect(
        self, rank: int, endpoints: Mapping[int, _Endpoint], timeout_s: float, check_peers: Callable[[], None]
    ) -> Links:
        """Connect to the ranks below this one, and accept those above. Collective.

        Args:
            rank: this rank in the group.
            endpoints: endpoint of each other rank.
            timeout_s: seconds until a missing rank is an error.
            check_peers: called while waiting; raises if a rank can no longer come.

        Raises:
            RendezvousError: a rank cannot be reached, did not come, or belongs to another job.
        """
        with _Handshakes(self._listener, self._key, rank, endpoints, self.endpoint[0]) as handshakes:
            for peer, (address, port, nonce) in endpoints.items():
                if peer < rank:
                    handshakes.begin(peer, (address, port), self._secret.derive("handshake", nonce))
            deadline = time.monotonic() + timeout_s
            while missing := [peer for peer in endpoints if peer not in handshakes.sockets]:
                if time.monotonic() >= deadline:
                    raise RendezvousError(
                        f"ranks {missing} did not connect to rank {rank} within {timeout_s:g} s{handshakes.strangers()}"
                    )
                check_peers()
                handshakes.go_on()
            return Links(handshakes.take())

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()


class _Handshakes:
    """All handshakes of one rank, which run at the same time. See [Note: strangers]. A context manager.

    Args:
        listener: accepts the ranks above this one; closed at the end.
        key: the key of this listener.
        rank: this rank in the group.
        endpoints: endpoint of each other rank.
        address: address of this host.

    Attributes:
        sockets: the connections made so far, by rank.
    """

    def __init__(
        self, listener: socket.socket, key: Secret, rank: int, endpoints: Mapping[int, _Endpoint], address: str
    ) -> None:
        self._listener = listener
        self._key = key
        self._rank = rank
        self._endpoints = endpoints
        self._address = address
        self._incoming: dict[int, IncomingHandshake] = {}  # by descriptor
        self._outgoing: dict[int, OutgoingHandshake] = {}  # by peer
        self._refused: dict[str, str] = {}  # by address
        self.sockets: dict[int, socket.socket] = {}

    def __enter__(self) -> _Handshakes:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for handshake in self._incoming.values():
            self._refuse(handshake, "it sent nothing that a rank would send")
        for outgoing in self._outgoing.values():
            if outgoing.socket is not None:
                outgoing.socket.close()
        for link in self.sockets.values():
            link.close()

    def take(self) -> dict[int, socket.socket]:
        """Hand the connections over to the caller."""
        taken, self.sockets = self.sockets, {}
        return taken

    def begin(self, peer: int, endpoint: tuple[str, int], key: Secret) -> None:
        """Start connecting to a lower rank."""
        with self._explained(peer):
            self._outgoing[peer] = OutgoingHandshake(self._rank, peer, endpoint, key, self._address)

    def go_on(self) -> None:
        """Advance the handshakes that can continue now; waits a moment if none can."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for descriptor in self._incoming:
            poll.register(descriptor, select.POLLIN)
        outgoing: dict[int, OutgoingHandshake] = {}
        now_s = time.monotonic()
        for handshake in self._outgoing.values():
            handshake.begin_again(now_s)
            if handshake.socket is not None:
                poll.register(handshake.socket, handshake.events)
                outgoing[handshake.socket.fileno()] = handshake
        for descriptor, _ in poll.poll(_POLL_MS):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in outgoing:
                self._advance_outgoing(outgoing[descriptor])
            else:
                self._advance_incoming(self._incoming[descriptor])
        self._let_go(time.monotonic())

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, source = self._listener.accept()
                handshake = IncomingHandshake(link, str(source[0]), self._rank, self._key, self._admit)
                self._incoming[link.fileno()] = handshake

    def _advance_outgoing(self, handshake: OutgoingHandshake) -> None:
        with self._explained(handshake.peer):
            if handshake.advance():
                assert handshake.socket is not None
                self.sockets[handshake.peer] = handshake.socket
                del self._outgoing[handshake.peer]

    def _advance_incoming(self, handshake: IncomingHandshake) -> None:
        try:
            peer = handshake.advance()
        except Stranger as stranger:
            self._refuse(handshake, str(stranger))
            return
        if peer is not None:
            del self._incoming[handshake.socket.fileno()]
            before = self.sockets.get(peer)
            if before is not None:
                before.close()
            self.sockets[peer] = handshake.socket

    def _admit(self, peer: int, address: str) -> None:
        endpoint = self._endpoints.get(peer)
        if endpoint is None or peer < self._rank:
            raise Stranger(f"it claims to be rank {peer}, which does not connect here")
        if not self._key.is_given and address != endpoint[0]:
            raise Stranger(f"it claims to be rank {peer}, whose address is {endpoint[0]}")
        before = self.sockets.get(peer)
        if before is not None and not _is_closed(before):
            raise Stranger(f"it claims to be rank {peer}, which is already connected")

    def _let_go(self, now_s: float) -> None:
        """Drop handshakes that take too long, and the oldest if there are too many."""
        late = [handshake for handshake in self._incoming.values() if now_s > handshake.deadline]
        room = _MOST_STRANGERS + len(self._endpoints)
        for handshake in late or list(self._incoming.values())[: max(0, len(self._incoming) - room)]:
            self._refuse(handshake, "it sent nothing that a rank would send")

    def _refuse(self, handshake: IncomingHandshake, why: str) -> None:
        self._incoming = {key: one for key, one in self._incoming.items() if one is not handshake}
        handshake.socket.close()
        if handshake.address not in self._refused and len(self._refused) < _MOST_STRANGERS:
            self._refused[handshake.address] = why
            warn_once(
                get_logger(__name__),
                f"rank {self._rank} of a new group refused a connection from {handshake.address}: {why}. "
                "The job continues",
            )

    def strangers(self) -> str:
        """The rejected connections, as the end of an error message."""
        return "".join(f"; one from {address} was refused: {why}" for address, why in self._refused.items())

    @contextlib.contextmanager
    def _explained(self, peer: int) -> Iterator[None]:
        address, port, _ = self._endpoints[peer]
        try:
            yield
        except (OSError, RendezvousError) as error:
            if isinstance(error, RendezvousError):
                advice = "Do all ranks have the same LOCKSTEP_TOKEN?"
            else:
                advice = (
                    "If a firewall lies between the hosts it must let their ranks connect; GLOO_SOCKET_IFNAME chooses "
                    "another interface"
                )
            raise RendezvousError(
                f"rank {self._rank} cannot connect to rank {peer} at {address}, port {port}: {error}. {advice}"
            ) from None


def _is_closed(link: socket.socket) -> bool:
    """Whether the other end has closed a connection on which it has sent nothing yet."""
    try:
        return link.recv(1, socket.MSG_PEEK) == b""
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
