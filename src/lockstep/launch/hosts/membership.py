"""The membership of a job: which hosts take part; a state shared by all launchers. Pure functions, no torch.

[Note: membership] The state is one JSON text, which launchers only change by compare-and-set. So each launcher sees
every change as a whole; a launcher that was too late reads the new state and tries again.

GATHERING  hosts join: `members` grows until there are `max_nodes`, or at least `min_nodes` and no host has joined for
   │       a while
   │       the hosts get their numbers
RUNNING    `members` is the round's list of hosts. A host that joins now waits in `waiting`. A host leaves the round by
   │       leaving the list, or is removed from it when its heartbeat stops
   │       the list is empty
   └────── GATHERING, with all waiting hosts, as the next round

`closed` ends all of this; it holds the reason.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace

from lockstep.json_records import read_record

__all__ = ["Host", "JobTerms", "Membership"]


@dataclass(frozen=True)
class Host:
    """One host of the job: its launcher and its ranks.

    Attributes:
        key: a text that identifies the launcher.
        name: name of the host.
        pid: pid of the launcher.
        address: the address by which the other hosts reach it.
        num_ranks: number of ranks that it starts.
        node_rank: the number that the user gave it, or None.
        spare_port: port of its spare store, in case the launchers lose their rendezvous endpoint; None for none.
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
class JobTerms:
    """The options that must be the same for all launchers of a job."""

    min_nodes: int
    max_nodes: int
    max_restarts: int


@dataclass(frozen=True)
class Membership:
    """The shared state of a job, and its transitions. See [Note: membership].

    Attributes:
        terms: the options of the first launcher.
        number: number of the round that gathers or runs, from 0.
        is_running: whether the round is running, with a fixed list of hosts.
        members: hosts of the round, in the order of their numbers once it runs.
        waiting: hosts that wait for the next round.
        next_number: minimum number of the next round.
        failures: number of rounds that have failed.
        failed_round: number of the last round that failed.
        order: keys of the hosts of the round that ran last, in the order of their numbers.
        is_abandoned: whether the launcher that holds the store is about to leave, and the others continue elsewhere.
        closed: why the job is over; None while it is not.
        exit_code: exit code of the job, once it is closed.
    """

    terms: JobTerms
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
        """Encode as text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Membership:
        """Decode from text.

        Raises:
            ValueError: the text is not a state.
        """
        try:
            return read_record(cls, text)
        except ValueError as error:
            raise ValueError(f"no state of a job: {error}") from None

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All hosts: members and waiting ones."""
        return self.members + self.waiting

    @property
    def has_room(self) -> bool:
        """Whether waiting hosts may join the round."""
        return len(self.members) < self.terms.max_nodes

    @property
    def is_full(self) -> bool:
        """Whether a gathering round has the maximum number of hosts."""
        return self.is_enough and len(self.members) >= self.terms.max_nodes

    @property
    def is_enough(self) -> bool:
        """Whether a gathering round could begin: it has enough hosts, no two of which have the same number."""
        numbers = [host.node_rank for host in self.members if host.node_rank is not None]
        return len(self.members) >= self.terms.min_nodes and len(set(numbers)) == len(numbers)

    def without(self, keys: Collection[str]) -> Membership:
        """The state after these hosts have gone."""
        members, waiting = (
            tuple(host for host in hosts if host.key not in keys) for hosts in (self.members, self.waiting)
        )
        return replace(self, members=members, waiting=waiting)._settled()

    def joined(self, host: Host) -> Membership:
        """The state after a host has left the current round to take part in the next."""
        if any(other.key == host.key for other in self.waiting):
            return self
        if not self.is_running and any(other.key == host.key for other in self.members):
            return self
        left = self.without([host.key])
        return replace(left, waiting=(*left.waiting, host))._settled()

    def begun(self) -> Membership:
        """The state after the hosts of a gathering round have got their numbers, so that it runs.

        Hosts numbered by the user come first, in order. The others keep their order from the previous round, so that
        rank 0 stays on a host that was already in the job, followed by new hosts in order of arrival.
        """
        positions = {key: position for position, key in enumerate(self.order)}

        def position(host: Host) -> tuple[int, int]:
            told = self.terms.max_nodes if host.node_rank is None else host.node_rank
            return told, positions.get(host.key, len(positions))

        members = tuple(sorted(self.members, key=position))
        return replace(self, is_running=True, members=members, order=tuple(host.key for host in members))

    def continued(self, number: int, failures: int) -> Membership:
        """The state after hosts joined whose job has continued elsewhere: the next round has at least that number."""
        known = replace(self, next_number=max(self.next_number, number), failures=max(self.failures, failures))
        return known if self.is_running else replace(known, number=max(self.number, number))

    def failed(self, number: int) -> Membership:
        """The state after round `number` has failed; repeating this from several hosts changes nothing."""
        if self.failed_round >= number:
            return self
        return replace(self, failures=self.failures + 1, failed_round=number)

    def ended(self, reason: str, exit_code: int) -> Membership:
        """The state after the job is over. The first reason is kept."""
        return self if self.closed is not None else replace(self, closed=reason, exit_code=exit_code)

    def namesake(self, host: Host) -> Host | None:
        """The host with the same number that came before this one; None if there is none."""
        for other in self.hosts:
            if other.key == host.key:
                break
            if other.node_rank == host.node_rank is not None:
                return other
        return None

    def _settled(self) -> Membership:
        """Begin the next round if the last member has left; admit waiting hosts."""
        now = self
        if now.is_running and not now.members:
            now = replace(now, is_running=False, number=max(now.number + 1, now.next_number))
        if not now.is_running and now.waiting and now.has_room:
            room = now.terms.max_nodes - len(now.members)
            now = replace(now, members=now.members + now.waiting[:room], waiting=now.waiting[room:])
        return now
