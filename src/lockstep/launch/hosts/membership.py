"""Who takes part in a job: a state that all launchers share, and its transitions. Pure functions, no torch.

[Note: membership] The state is one JSON text, which launchers change by compare-and-set only. So each launcher sees
every change as a whole; a launcher that was too late reads the new state and tries again.

GATHERING  hosts come: `members` grows until there are `max_nodes`, or at least `min_nodes` and nobody has come for
   │       a while
   │       the hosts are given their numbers
RUNNING    `members` is the round's list of hosts. Who comes now stands in `waiting`. A host leaves the round by
   │       leaving the list, or is taken off it when it gives no sign of life
   │       the list is empty
   └────── GATHERING, with all who wait, as the next round

`closed` ends all of it; it holds the reason.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from typing import TypeVar

__all__ = ["Host", "Membership", "Terms"]


@dataclass(frozen=True)
class Host:
    """One launcher.

    Attributes:
        key: unlike that of any other launcher.
        name: the host's name.
        pid: of the launcher.
        address: how the other hosts reach it.
        num_ranks: how many ranks it starts.
        node_rank: the number it was given, or None.
        spare_port: where it listens in case that the launchers lose their meeting place; None: it does not.
    """

    key: str
    name: str
    pid: int
    address: str
    num_ranks: int
    node_rank: int | None = None
    spare_port: int | None = None

    def __str__(self) -> str:
        number = "" if self.node_rank is None else f"node rank {self.node_rank}, "
        return f"host {self.name} ({number}launcher pid {self.pid})"


@dataclass(frozen=True)
class Terms:
    """What all launchers of a job must have been told alike."""

    min_nodes: int
    max_nodes: int
    max_restarts: int


_Record = TypeVar("_Record", "Terms", "Host", "Membership")
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "bool": (bool,),
    "str": (str,),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
}


def _typed(record: _Record) -> _Record:
    """The same record, each of whose plain fields has a value of its type.

    Raises:
        TypeError: one has not.
    """
    for one in fields(record):
        kinds = _KINDS.get(str(one.type))
        value = getattr(record, one.name)
        if kinds is not None and type(value) not in kinds:
            raise TypeError(f"{one.name} is {str(value)[:40]!r}")
    return record


@dataclass(frozen=True)
class Membership:
    """The state. See [Note: membership].

    Attributes:
        terms: of the first launcher.
        number: of the round that gathers or runs, from 0.
        is_running: whether the hosts of the round are settled.
        members: of the round; in the order of their numbers once it runs.
        waiting: for the next round.
        next_number: the next round has at least this number.
        failures: how many rounds have failed.
        failed_round: the last that has.
        order: keys of the hosts of the round that ran last, in the order of their numbers.
        is_abandoned: who holds the store is about to leave, and the others go on elsewhere.
        closed: why the job is over; None while it is not.
        exit_code: of the job, once it is closed.
    """

    terms: Terms
    number: int = 0
    is_running: bool = False
    members: tuple[Host, ...] = ()
    waiting: tuple[Host, ...] = ()
    next_number: int = 0
    failures: int = 0
    failed_round: int = -1
    order: tuple[str, ...] = ()
    is_abandoned: bool = False
    closed: str | None = None
    exit_code: int = 0

    def encode(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Membership:
        """From text.

        Raises:
            ValueError: that is no state.
        """
        try:
            found = json.loads(text)
            found["terms"] = _typed(Terms(**found["terms"]))
            for name in ("members", "waiting"):
                found[name] = tuple(_typed(Host(**host)) for host in found[name])
            found["order"] = tuple(str(key) for key in found["order"])
            return _typed(cls(**found))
        except (TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"no state of a job: {error}") from None

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All that are known."""
        return self.members + self.waiting

    @property
    def has_room(self) -> bool:
        """Whether those who wait may join the round's hosts."""
        return len(self.members) < self.terms.max_nodes

    @property
    def is_full(self) -> bool:
        """Whether a round that gathers need not wait for anybody else."""
        return self.is_enough and len(self.members) >= self.terms.max_nodes

    @property
    def is_enough(self) -> bool:
        """Whether a round that gathers could begin: with hosts enough, no two of which have the same number."""
        numbers = [host.node_rank for host in self.members if host.node_rank is not None]
        return len(self.members) >= self.terms.min_nodes and len(set(numbers)) == len(numbers)

    def without(self, keys: Collection[str]) -> Membership:
        """After these hosts have gone."""
        members, waiting = (
            tuple(host for host in hosts if host.key not in keys) for hosts in (self.members, self.waiting)
        )
        return replace(self, members=members, waiting=waiting)._settled()

    def joined(self, host: Host) -> Membership:
        """After a host has asked to take part in the next round, which it leaves the present one for."""
        if any(other.key == host.key for other in self.waiting):
            return self
        if not self.is_running and any(other.key == host.key for other in self.members):
            return self
        left = self.without([host.key])
        return replace(left, waiting=(*left.waiting, host))._settled()

    def begun(self) -> Membership:
        """After the hosts of a round that gathers have been given their numbers.

        Those that were told theirs come first, in order. The others keep their order of the round before, so that rank
        0 stays on a host that has seen the job, and newcomers follow as they came.
        """
        positions = {key: position for position, key in enumerate(self.order)}

        def position(host: Host) -> tuple[int, int]:
            told = self.terms.max_nodes if host.node_rank is None else host.node_rank
            return told, positions.get(host.key, len(positions))

        members = tuple(sorted(self.members, key=position))
        return replace(self, is_running=True, members=members, order=tuple(host.key for host in members))

    def continued(self, number: int, failures: int) -> Membership:
        """After hosts have come whose job has gone on elsewhere: the next round has at least that number."""
        known = replace(self, next_number=max(self.next_number, number), failures=max(self.failures, failures))
        return known if self.is_running else replace(known, number=max(self.number, number))

    def failed(self, number: int) -> Membership:
        """After round `number` has failed; hosts that say so too change nothing."""
        if self.failed_round >= number:
            return self
        return replace(self, failures=self.failures + 1, failed_round=number)

    def ended(self, reason: str, exit_code: int) -> Membership:
        """After the job is over. The first reason stays."""
        return self if self.closed is not None else replace(self, closed=reason, exit_code=exit_code)

    def namesake(self, host: Host) -> Host | None:
        """A host with the same number that came before this one."""
        for other in self.hosts:
            if other.key == host.key:
                break
            if other.node_rank == host.node_rank is not None:
                return other
        return None

    def _settled(self) -> Membership:
        """Go on to the next round if the last member has left; take in those who wait."""
        now = self
        if now.is_running and not now.members:
            now = replace(now, is_running=False, number=max(now.number + 1, now.next_number))
        if not now.is_running and now.waiting and now.has_room:
            room = now.terms.max_nodes - len(now.members)
            now = replace(now, members=now.members + now.waiting[:room], waiting=now.waiting[room:])
        return now
