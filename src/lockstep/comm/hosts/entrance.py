"""Where the ranks of a new group over several hosts connect to each other.

A rank listens while the group is being made, on the chosen address of its host and a free port, and no longer: once all
are connected there is no listening port. Whoever connects has to prove who it is (`greeting.py`).

[Note: strangers] All greetings go on at the same time, each with a deadline of its own. So whoever connects and says
nothing, or says it byte by byte, keeps nobody else waiting. It is let go of in the end, and said once.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping

from lockstep.comm.hosts.greeting import Arrival, Stranger, Visit
from lockstep.comm.hosts.links import Links
from lockstep.errors import RendezvousError
from lockstep.log import get_logger, warn_once
from lockstep.network_interfaces import listen_on
from lockstep.secret import Secret, secret_of_ranks

__all__ = ["Entrance"]

_WORD_BYTES = 16
_POLL_MS = 50
_MOST_STRANGERS = 64

_Place = tuple[str, int, str]


class Entrance:
    """Where the other ranks of a new group connect to this one. Closed once they have.

    Args:
        address: of this host.
        secret: of the job.

    Attributes:
        place: what the others must know, to be published: address, port and word.
    """

    def __init__(self, address: str, secret: Secret | None = None) -> None:
        word = secrets.token_hex(_WORD_BYTES)
        self._secret = secret_of_ranks() if secret is None else secret
        self._key = self._secret.derive("entrance", word)
        self._listener = listen_on(address)
        self._listener.setblocking(False)
        self.place: _Place = (address, int(self._listener.getsockname()[1]), word)

    def connect(self, rank: int, places: Mapping[int, _Place], timeout_s: float, look_out: Callable[[], None]) -> Links:
        """Connect to all others: to those of lower rank, and let in those of higher. Collective.

        Args:
            rank: this rank.
            places: of the other ranks.
            timeout_s: until a rank that does not come is an error.
            look_out: called while waiting; raises if a rank cannot come.

        Raises:
            RendezvousError: a rank cannot be reached, or did not come, or is another job's.
        """
        with _Greetings(self._listener, self._key, rank, places, self.place[0]) as greetings:
            for peer, (address, port, word) in places.items():
                if peer < rank:
                    greetings.visit(peer, (address, port), self._secret.derive("entrance", word))
            deadline = time.monotonic() + timeout_s
            while missing := [peer for peer in places if peer not in greetings.sockets]:
                if time.monotonic() >= deadline:
                    raise RendezvousError(
                        f"ranks {missing} did not connect to rank {rank} within {timeout_s:g} s{greetings.strangers()}"
                    )
                look_out()
                greetings.go_on()
            return Links(greetings.take())

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()


class _Greetings:
    """All greetings of one rank, under way at the same time. See [Note: strangers]. A context manager.

    Args:
        listener: where the ranks of higher number come; closed in the end.
        key: of this entrance.
        rank: this rank.
        places: of the others.
        address: of this host.

    Attributes:
        sockets: the connections that are made, by rank.
    """

    def __init__(
        self, listener: socket.socket, key: Secret, rank: int, places: Mapping[int, _Place], address: str
    ) -> None:
        self._listener = listener
        self._key = key
        self._rank = rank
        self._places = places
        self._address = address
        self._arrivals: dict[int, Arrival] = {}  # by descriptor
        self._visits: dict[int, Visit] = {}  # by peer
        self._refused: dict[str, str] = {}  # by address
        self.sockets: dict[int, socket.socket] = {}

    def __enter__(self) -> _Greetings:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for arrival in self._arrivals.values():
            self._refuse(arrival, "it said nothing that a rank says")
        for visit in self._visits.values():
            if visit.socket is not None:
                visit.socket.close()
        for link in self.sockets.values():
            link.close()

    def take(self) -> dict[int, socket.socket]:
        """The connections, which are the caller's from here on."""
        taken, self.sockets = self.sockets, {}
        return taken

    def visit(self, peer: int, place: tuple[str, int], key: Secret) -> None:
        """Begin to connect to a rank of lower number."""
        with self._explained(peer):
            self._visits[peer] = Visit(self._rank, peer, place, key, self._address)

    def go_on(self) -> None:
        """Do what can be done now; waits a moment if there is nothing."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for descriptor in self._arrivals:
            poll.register(descriptor, select.POLLIN)
        visits: dict[int, Visit] = {}
        now_s = time.monotonic()
        for visit in self._visits.values():
            visit.begin_again(now_s)
            if visit.socket is not None:
                poll.register(visit.socket, visit.events)
                visits[visit.socket.fileno()] = visit
        for descriptor, _ in poll.poll(_POLL_MS):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in visits:
                self._go_on_visiting(visits[descriptor])
            else:
                self._go_on_hosting(self._arrivals[descriptor])
        self._let_go(time.monotonic())

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, place = self._listener.accept()
                arrival = Arrival(link, str(place[0]), self._rank, self._key, self._admit)
                self._arrivals[link.fileno()] = arrival

    def _go_on_visiting(self, visit: Visit) -> None:
        with self._explained(visit.peer):
            if visit.advance():
                assert visit.socket is not None
                self.sockets[visit.peer] = visit.socket
                del self._visits[visit.peer]

    def _go_on_hosting(self, arrival: Arrival) -> None:
        try:
            peer = arrival.advance()
        except Stranger as stranger:
            self._refuse(arrival, str(stranger))
            return
        if peer is not None:
            del self._arrivals[arrival.socket.fileno()]
            before = self.sockets.get(peer)
            if before is not None:
                before.close()
            self.sockets[peer] = arrival.socket

    def _admit(self, peer: int, address: str) -> None:
        place = self._places.get(peer)
        if place is None or peer < self._rank:
            raise Stranger(f"it says that it is rank {peer}, which does not come here")
        if not self._key.is_given and address != place[0]:
            raise Stranger(f"it says that it is rank {peer}, whose address is {place[0]}")
        before = self.sockets.get(peer)
        if before is not None and not _is_closed(before):
            raise Stranger(f"it says that it is rank {peer}, which has come")

    def _let_go(self, now_s: float) -> None:
        """Refuse those that take too long, and the oldest where there are too many."""
        late = [arrival for arrival in self._arrivals.values() if now_s > arrival.deadline]
        room = _MOST_STRANGERS + len(self._places)
        for arrival in late or list(self._arrivals.values())[: max(0, len(self._arrivals) - room)]:
            self._refuse(arrival, "it said nothing that a rank says")

    def _refuse(self, arrival: Arrival, why: str) -> None:
        self._arrivals = {key: one for key, one in self._arrivals.items() if one is not arrival}
        arrival.socket.close()
        if arrival.address not in self._refused and len(self._refused) < _MOST_STRANGERS:
            self._refused[arrival.address] = why
            warn_once(
                get_logger(__name__),
                f"rank {self._rank} of a new group refused a connection from {arrival.address}: {why}. The job goes on",
            )

    def strangers(self) -> str:
        """Who was refused, as the end of a message."""
        return "".join(f"; one from {address} was refused: {why}" for address, why in self._refused.items())

    @contextlib.contextmanager
    def _explained(self, peer: int):  # type: ignore[no-untyped-def]  # a generator
        address, port, _ = self._places[peer]
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
    """Whether the other end has closed a connection on which nothing was said yet."""
    try:
        return link.recv(1, socket.MSG_PEEK) == b""
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
