"""Finding out which ranks of a new group share a host, and at which address each host listens.

Ranks share a host if they have the same boot id and process ids, or if the one can open a segment of shared memory of
the other: two containers of one machine that share neither are two hosts.

Then the first rank of each host opens a door on every address its host might listen on (`rendezvous/interfaces.py`),
and tries the doors of all other hosts. A host's address is the one that most others reach, the best by its own ranking
among equals; one that nobody reaches is an error that names what was tried.

What ranks need to know is exchanged through the store, under keys of this group that each deletes again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from lockstep import env
from lockstep.comm.hosts.layout import Member
from lockstep.errors import LockstepError, RendezvousError, SharedMemoryError
from lockstep.rendezvous.interfaces import Door, candidates, reachable
from lockstep.shm.liveness import PeerIdentity, own_identity
from lockstep.shm.meeting import Store
from lockstep.shm.segment import PAGE_BYTES, Segment, boot_id

__all__ = ["Notes", "find_members"]

_Answer = TypeVar("_Answer")

_LONGEST_NAP_S = 0.02
_TROUBLE = "trouble"
_PARTING_S = 5.0
_LOOK_AGAIN_S = 0.5


class Notes:
    """What the ranks of a new group tell each other through the store.

    Args:
        store: nobody else uses its keys.
        rank: this rank.
        global_ranks: the global rank of each.
        timeout_s: until a rank that does not come is an error.
        look_out: called while waiting; raises if a rank that is awaited cannot come.
    """

    def __init__(
        self, store: Store, rank: int, global_ranks: Sequence[int], timeout_s: float, look_out: Callable[[], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._global_ranks = tuple(global_ranks)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._look_out = look_out
        self._written: dict[str, str] = {}
        self._look_again_s = 0.0

    def write(self, topic: str, value: Any) -> None:
        """Tell all ranks something: JSON."""
        key, text = f"{topic}{self._rank}", json.dumps(value)
        self._ask(lambda: self._store.set(key, text))
        self._written[key] = text

    def read(self, topic: str, ranks: Sequence[int]) -> list[Any]:
        """What these ranks told about a topic, in order.

        Raises:
            RendezvousError: a rank said nothing in time; names it.
            RankLost: a rank cannot come.
        """
        found: dict[int, Any] = {}
        nap_s = 0.0002
        while True:
            for rank in ranks:
                if rank not in found and (said := self._said(f"{topic}{rank}")) is not None:
                    found[rank] = self._parse(topic, rank, said)
            if len(found) == len(ranks):
                return [found[rank] for rank in ranks]
            self._look_out()
            trouble = self._said(_TROUBLE)
            if trouble is not None:
                raise RendezvousError(trouble)
            if time.monotonic() > self._deadline:
                missing = ", ".join(f"rank {self._global_ranks[rank]}" for rank in ranks if rank not in found)
                raise RendezvousError(
                    f"{missing} did not come within {self._timeout_s:g} s of rank {self._global_ranks[self._rank]}. Is "
                    f"every rank running, with the same world size of {len(self._global_ranks)}?"
                )
            self._write_again()
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def _parse(self, topic: str, rank: int, said: str) -> Any:
        try:
            return json.loads(said)
        except (ValueError, RecursionError):
            raise RendezvousError(
                f"rank {self._global_ranks[rank]} says of {topic!r} what no rank says: {said[:60]!r}"
            ) from None

    def _write_again(self) -> None:
        """What somebody has written over: he may have had his reasons, and the others wait for it."""
        now_s = time.monotonic()
        if now_s > self._look_again_s:
            for key, text in self._written.items() if self._look_again_s else ():
                if self._said(key) is None:
                    self._ask(lambda key=key, text=text: self._store.set(key, text))  # type: ignore[misc]
            self._look_again_s = now_s + _LOOK_AGAIN_S

    def part(self, ranks: Sequence[int]) -> None:
        """Before all raise the same: wait a moment until all know. The store may go with the first that ends."""
        self._deadline = min(self._deadline, time.monotonic() + _PARTING_S)
        with contextlib.suppress(LockstepError):
            self.write("parting", True)
            self.read("parting", ranks)

    def give_up(self, error: Exception) -> None:
        """Let the others know that this rank will not join, so that they need not wait for it."""
        name = f"rank {self._global_ranks[self._rank]}"
        with contextlib.suppress(RuntimeError):
            self._store.set(_TROUBLE, f"{name} could not join: {str(error).splitlines()[0]}")

    def _said(self, key: str) -> str | None:
        """What stands under that key, if anything does."""
        return self._ask(lambda: self._store.get(key) if self._store.has(key) else None)

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        """Put a question to the store, which may be gone: it ends with the rank that has it."""
        try:
            return question()
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {self._global_ranks[self._rank]} lost the store in which the ranks meet: "
                f"{str(error).splitlines()[0]}"
            ) from None

    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return max(self._deadline - time.monotonic(), 0.001)

    def erase(self) -> None:
        """Delete what this rank has told. Once all have read it."""
        for key in self._written:
            self._store.delete(key)
        self._written.clear()


@dataclass(frozen=True)
class _Card:
    """What a rank says of itself."""

    identity: PeerIdentity
    boot_id: str
    handle: str

    @classmethod
    def decode(cls, found: Any) -> _Card:
        try:
            card = cls(**{**found, "identity": PeerIdentity(**found["identity"])})
            is_typed = isinstance(card.boot_id, str) and isinstance(card.handle, str)
            _ = card.identity.pid + card.identity.start_time + card.identity.pid_namespace, card.identity.host + ""
        except (TypeError, KeyError, AttributeError):
            is_typed = False
        if not is_typed:
            raise RendezvousError(f"a rank says of itself what no rank says: {str(found)[:60]!r}")
        return card


def find_members(notes: Notes, rank: int, world_size: int) -> list[Member]:
    """All ranks of a new group. Collective.

    Raises:
        RendezvousError: a rank did not come, or a host cannot be reached.
    """
    everyone = range(world_size)
    segment = Segment.create(PAGE_BYTES)  # for others to find out whether they can open it
    try:
        own = _Card(own_identity(), boot_id(), segment.handle)
        notes.write("card", asdict(own))
        cards = [_Card.decode(found) for found in notes.read("card", everyone)]
        notes.write("first", _first_on_host(own, cards, rank))
        first = [int(found) for found in notes.read("first", everyone)]
    finally:
        segment.release()
    hosts = sorted(set(first))
    addresses = (
        _find_addresses(notes, rank, hosts, [cards[host].identity.host for host in hosts]) if len(hosts) > 1 else {}
    )
    return [
        Member(card.identity, host, *addresses.get(host, ("", ""))) for card, host in zip(cards, first, strict=True)
    ]


def _first_on_host(own: _Card, cards: Sequence[_Card], rank: int) -> int:
    """The lowest rank that shares a host with this one."""
    for peer, card in enumerate(cards[:rank]):
        if card.boot_id != own.boot_id:
            continue
        if card.identity.pid_namespace == own.identity.pid_namespace:
            return peer
        try:
            Segment.attach(card.handle, size_bytes=PAGE_BYTES).release()
        except SharedMemoryError:
            continue
        return peer
    return rank


def _find_addresses(notes: Notes, rank: int, hosts: Sequence[int], names: Sequence[str]) -> dict[int, tuple[str, str]]:
    """Address and interface of each host, by its first rank. Collective."""
    door: Door | None = None
    try:
        if rank in hosts:
            door = Door(candidates(env.snapshot()))
            notes.write("door", {"nonce": door.nonce, "places": door.places})
        doors = dict(zip(hosts, notes.read("door", hosts), strict=True))
        if rank in hosts:
            others = {
                host: (found["nonce"], [(address, port) for _, address, port in found["places"]])
                for host, found in doors.items()
                if host != rank
            }
            notes.write("reached", reachable(others))
        reached = notes.read("reached", hosts)
    finally:
        if door is not None:
            door.close()
    chosen: dict[int, tuple[str, str]] = {}
    for host, name in zip(hosts, names, strict=True):
        places = doors[host]["places"]
        votes = [sum(index in found.get(str(host), ()) for found in reached) for index in range(len(places))]
        if not votes or max(votes) < len(hosts) - 1:
            tried = ", ".join(f"{interface} {address}" for interface, address, _ in places) or "no address"
            deaf = [
                other for other, found in zip(names, reached, strict=True) if not found.get(str(host)) and other != name
            ]
            raise RendezvousError(
                f"host {name} cannot be reached from {', '.join(deaf) or 'all others at one address'}; tried {tried}. "
                "Is there a firewall between them? GLOO_SOCKET_IFNAME chooses the network interface"
            )
        interface, address, _ = places[votes.index(max(votes))]
        chosen[host] = (address, interface)
    return chosen
