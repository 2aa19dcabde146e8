"""Rounds of hosts, agreed on through the store, with torch's rendezvous interface. See [Note: rounds of hosts].

[Note: leave reasons] A host that leaves a round on purpose publishes the reason before it ends its ranks: another host
came, it was told to end, or it found that another host is gone. So the other hosts, whose ranks then lose these, know
that nothing has failed. A host whose ranks fail publishes that too, and the ranks of the others get a moment to notice
by themselves before they are ended.

[Note: moving] The launcher that holds the store may be the one that is lost. If the number of hosts may change, every
launcher therefore has a spare store. The remaining hosts of the last round move to the spare store of the first of
them, in the order of their numbers, so all find the same one, and begin a round there. The launcher that holds it
checks every two seconds whether there is a store at the first endpoint again, as a launcher that is started there opens
one; then all move back. A network partition splits the job into two, unless half of the hosts are too few to run.

[Note: put back] A foreign process may overwrite or remove the state. Every launcher keeps the last state that it has
seen with this job's MAC and puts it back unchanged, with its count; a launcher that has seen a later one then puts that
back. So the job continues from the latest state that any launcher knows. A host puts back its own values of a round.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from lockstep.errors import LaunchError
from lockstep.launch.free_port import find_free_port
from lockstep.launch.hosts.heartbeat import Heartbeat, Observer
from lockstep.launch.hosts.job_store import JobStore, StoreLost
from lockstep.launch.hosts.membership import Host, JobTerms, Membership
from lockstep.launch.hosts.options import HostsConfig
from lockstep.launch.screen import say
from lockstep.secret import Refused

__all__ = ["HostRendezvous", "JobClosed"]

_MEMBERSHIP = "membership"
_POLL_S = 0.1
_LOOK_EVERY_S = 0.25
_ANNOUNCE_AFTER_S = 2.0
_LOOK_HOME_EVERY_S = 2.0
_LOOK_HOME_TIMEOUT_S = 0.3
_PROBE_TIMEOUT_S = 3.0
_MOVED = "moved"
_LEAVE_REASON = "notice"  # its key within the round
_PUT_BACK_EVERY_S = 1.0
_TRIES = 200
_FOREIGN_LOOKS = 20


class JobClosed(Exception):
    """Another host has closed the job.

    Attributes:
        membership: the last state of the job.
        is_cut_short: whether ranks of this host were still running.
    """

    def __init__(self, membership: Membership, is_cut_short: bool = False) -> None:
        super().__init__(membership.closed)
        self.membership = membership
        self.is_cut_short = is_cut_short


class HostRendezvous(RendezvousHandler):
    """This launcher's view of the job's rounds.

    Args:
        config: the endpoint of the store, and the number of hosts.
        job_store: the store in which the launchers meet.
        num_ranks: number of ranks that this host starts.
        max_restarts: how many failed rounds may be followed by another.
        check: waits that many seconds; raises when this launcher is told to end.

    Attributes:
        host: this launcher.
        membership: the state of the job when this launcher last read it; its `members` are the hosts of the current
            round.
        members: the hosts of the round, in order of their numbers.
        number: number of the round.
        position: number of this host in the round.
        master: address and port of rank 0.
    """

    def __init__(
        self,
        config: HostsConfig,
        job_store: JobStore,
        num_ranks: int,
        max_restarts: int,
        check: Callable[[float], None],
    ) -> None:
        self._config = config
        self._job_store = job_store
        self._check = check
        self._terms = JobTerms(config.min_nodes, config.max_nodes, max_restarts)
        name = socket.gethostname()
        key = f"{name}-{os.getpid()}-{secrets.token_hex(4)}"
        self._is_away = False
        self._spare = JobStore.spare(config, job_store.address) if config.is_elastic else None
        spare_port = None if self._spare is None else self._spare.port
        self.host = Host(key, name, os.getpid(), job_store.address, num_ranks, config.node_rank, spare_port)
        self._heartbeat = Heartbeat(job_store.reconnect(), key, config.heartbeat_s)
        self._observer = Observer(job_store, config.lost_after_s)
        self._looked_home_s = 0.0
        self._sealed, self._count = "", 0  # the current state in the store, as far as this launcher knows
        self._num_foreign = 0
        self._published: dict[str, str] = {}
        self._put_back_s = 0.0
        self.membership = Membership(self._terms)
        self.membership = self._change(lambda membership: membership)
        self.members: tuple[Host, ...] = ()
        # Moving to another store resets this, because this host has no rounds there yet.
        self.number = self._last_number = -1
        self.position = 0
        self.master = (job_store.address, 0)
        self._looked_at_s = 0.0
        self._regroup = False

    # ---- torch's interface -------------------------------------------------------------------------

    def get_backend(self) -> str:
        """The name of this kind of rendezvous."""
        return "lockstep"

    @property
    def use_agent_store(self) -> bool:
        """False: the ranks do not use the agents' store. See [Note: torch]."""
        return False

    def get_run_id(self) -> str:
        """The job's name."""
        return self._config.run_id

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return self.look().closed is not None

    def set_closed(self) -> None:
        """Close the job, for all hosts."""
        self.close("it was closed", 1)

    def num_nodes_waiting(self) -> int:
        """Number of hosts waiting for another round, if one is to begin: torch's agent then begins it."""
        return max(1, len(self.membership.waiting)) if self._regroup else 0

    def shutdown(self) -> bool:
        """Leave the job, which continues if enough hosts remain."""
        with contextlib.suppress(StoreLost):  # a refusal at the last moment is reported, too
            self._warn()
        self._heartbeat.stop()
        for job_store in (self._job_store, self._spare):
            if job_store is not None:
                job_store.close()
        return True

    @property
    def has_belonged(self) -> bool:
        """Whether this host has run a round, or waited for one in a job that ran without it."""
        return self._last_number >= 0 or any(host.key == self.host.key for host in self.membership.waiting)

    def next_rendezvous(self) -> RendezvousInfo:
        """Leave the current round, and take part in the next as soon as there is one.

        Raises:
            JobClosed: the job is over.
            LaunchError: too few hosts came in time, or launchers have different options.
        """
        self._regroup = False
        try:
            return self._next_round()
        except StoreLost as lost:
            self.move(lost)
            return self.next_rendezvous()

    def _next_round(self) -> RendezvousInfo:
        self._take_part()
        self.number = self._last_number = self.membership.number
        self.members = self.membership.members
        self.position = [member.key for member in self.members].index(self.host.key)
        if self.position == 0:
            self.put("master", json.dumps([self.host.address, find_free_port()]))
        while (found := self.get("master")) is None:
            self._give_up_lost()
            if self.members[0].key not in {member.key for member in self.membership.members}:
                return self._next_round()  # the round has already ended
            self._check(_POLL_S)
        self.master = _read_master(found)
        store = self._job_store.torch_store(f"round{self.number}/agent")
        return RendezvousInfo(store, self.position, len(self.members), RendezvousStoreInfo(*self.master))

    # ---- within a round ----------------------------------------------------------------------------

    def look(self) -> Membership:
        """Read the state, and remove hosts without a heartbeat from it. Cheap to call often."""
        now_s = time.monotonic()
        if now_s - self._looked_at_s >= _LOOK_EVERY_S:
            self._looked_at_s = now_s
            self._give_up_lost()
            self._restore_values(now_s)
        return self.membership

    def _restore_values(self, now_s: float) -> None:
        """Rewrite this host's values if a foreign process has overwritten them, and warn. See [Note: put back]."""
        self._warn()
        if now_s - self._put_back_s < _PUT_BACK_EVERY_S:
            return
        self._put_back_s = now_s
        self._job_store.put_back_nonce()
        for key, sealed in self._published.items():
            if self._job_store.raw(key) != sealed and self._job_store.get(key) is None:
                self._job_store.put_back(key, sealed)

    def _warn(self) -> None:
        self._job_store.watch(lambda: {host.address for host in self.membership.hosts})

    def missing(self) -> list[Host]:
        """Hosts of this host's round that have left it, or were lost."""
        present = set() if self.membership.number != self.number else {member.key for member in self.membership.members}
        return [member for member in self.members if member.key not in present]

    def put(self, key: str, value: str) -> None:
        """Publish a value for the hosts of this round."""
        prefix = f"round{self.number}/"
        self._published = {name: sealed for name, sealed in self._published.items() if name.startswith(prefix)}
        self._published[prefix + key] = self._job_store.set(prefix + key, value)

    def get(self, key: str) -> str | None:
        """The value that a host of this round published under a key; None if there is none."""
        return self._job_store.get(f"round{self.number}/{key}")

    def leave_reason(self) -> str | None:
        """Why this round ends without a failure, a clause for the log; None if it does not."""
        return self.get(_LEAVE_REASON)

    def publish_leave_reason(self, text: str) -> None:
        """Publish why the round ends without a failure, before any ranks end. See [Note: leave reasons]."""
        self.put(_LEAVE_REASON, text)

    def token_of_ranks(self) -> str | None:
        """The secret of this round's ranks, the same on all hosts; None if the launchers have none."""
        secret = self._config.secret
        if not secret.is_given:
            return None
        return secret.derive("ranks", self._config.run_id, self._job_store.nonce, str(self.number)).as_token()

    def regroup(self) -> None:
        """Make torch's agent begin another round."""
        self._regroup = True

    def count_failure(self) -> int:
        """Count this round as failed; returns how many have failed so far."""
        number = self.number
        return self._change(lambda membership: membership.failed(number)).failures

    def close(self, reason: str, exit_code: int) -> None:
        """Close the job, for all hosts."""
        self._change(lambda membership: membership.ended(reason, exit_code))

    def leave(self, reason: str, exit_code: int) -> None:
        """Remove this host from the job, and close the job if too few remain. See [Note: leave reasons]."""
        if self.number >= 0:
            self.publish_leave_reason(reason)

        def left(membership: Membership) -> Membership:
            others = [host for host in membership.hosts if host.key != self.host.key]
            rest = replace(membership.without([self.host.key]), is_abandoned=self._job_store.is_holder)
            return rest if len(others) >= membership.terms.min_nodes else rest.ended(reason, exit_code)

        self._change(left)

    # ---- the store. See [Note: moving] -------------------------------------------------------------

    @property
    def job_store(self) -> JobStore:
        """The store in which the launchers currently meet."""
        return self._job_store

    def publish_departure(self) -> None:
        """Publish that this launcher no longer needs the store."""
        self._job_store.set(_departure_key(self.host), "1")

    def is_needed(self) -> bool:
        """Whether a launcher of the job still needs the store."""
        others = [host for host in self.look().hosts if host.key != self.host.key]
        return not all(self._job_store.get(_departure_key(host)) for host in others)

    def move(self, lost: StoreLost) -> None:
        """Move to another store, after the store was lost.

        Raises:
            StoreLost: there is no other store.
        """
        if self._spare is None:
            raise lost
        say(f"lockstep: {lost}; the remaining hosts meet elsewhere\n")
        home = None
        if not self.membership.is_abandoned:
            home = JobStore.try_connect(self._config, self.host.address, _PROBE_TIMEOUT_S, self._check)
        self._is_away = home is None
        self._settle_at(home if home is not None else self._first_spare(self._spare))

    def must_move(self) -> bool:
        """Move back to the first store if the launchers meet there again; returns whether. Cheap to call often."""
        if not self._is_away:
            return False
        now_s = time.monotonic()
        if self._job_store.is_holder and now_s - self._looked_home_s >= _LOOK_HOME_EVERY_S:
            self._looked_home_s = now_s
            if JobStore.try_connect(self._config, self.host.address, _LOOK_HOME_TIMEOUT_S, self._check) is not None:
                self._job_store.set(_MOVED, "1")
        if self._job_store.get(_MOVED) is None:
            return False
        home = JobStore.try_connect(self._config, self.host.address, _PROBE_TIMEOUT_S, self._check)
        if home is None:
            return False
        if self._job_store is self._spare:  # no longer needed
            self._spare = JobStore.spare(self._config, self.host.address)
            self.host = replace(self.host, spare_port=self._spare.port)
        number, failures = max(self.number, self.membership.number), self.membership.failures
        self._is_away = False
        self._settle_at(home)
        # At once, so that the others do not begin without this host while its ranks are being ended.
        self._change(lambda membership: membership.continued(number + 1, failures).joined(self.host))
        return True

    def _first_spare(self, own: JobStore) -> JobStore:
        """The spare store of the first remaining host of the last round."""
        left = {host.key for host in self.membership.hosts}
        for host in self.members or self.membership.hosts:
            if host.key == self.host.key:
                break
            if host.key in left and host.spare_port is not None:
                config = replace(self._config, address=host.address, port=host.spare_port)
                found = JobStore.try_connect(config, self.host.address, _PROBE_TIMEOUT_S, self._check)
                if found is not None:
                    return found
        return own

    def _settle_at(self, job_store: JobStore) -> None:
        self._heartbeat.stop()
        if self._job_store is not self._spare:
            self._job_store.close()
        self._job_store = job_store
        self._heartbeat = Heartbeat(job_store.reconnect(), self.host.key, self._config.heartbeat_s)
        self._observer = Observer(job_store, self._config.lost_after_s)
        self._looked_home_s = time.monotonic()
        self._sealed, self._count, self._published = "", 0, {}
        number = max(self.number + 1, self.membership.number + self.membership.is_running)
        self.membership = Membership(
            self._terms, number=number, failures=self.membership.failures, order=self.membership.order
        )
        self.membership = self._change(lambda membership: membership)
        self.number, self.members = -1, ()

    # ---- the state ---------------------------------------------------------------------------------

    def _change(self, transition: Callable[[Membership], Membership]) -> Membership:
        """Apply a transition to the current state; returns the new one."""
        for _ in range(_TRIES):
            raw = self._job_store.raw(_MEMBERSHIP)
            before = self._read(raw)
            if before is None:
                continue  # the state was put back
            after = transition(before)
            if raw and after == before:
                self.membership = before
                return before
            count = self._count + 1
            sealed = self._job_store.seal(_MEMBERSHIP, after.encode(), count)
            if self._job_store.compare_set(_MEMBERSHIP, raw, sealed):
                self.membership, self._sealed, self._count = after, sealed, count
                return after
        if not self._sealed:
            raise LaunchError(
                f"at {self._config.endpoint}, where the launchers meet, a process without this job's token keeps "
                "writing; choose another port, the same for all launchers"
            )
        return self.membership

    def _read(self, raw: str) -> Membership | None:
        """The state of the store; None if it was not written by this job, and was put back. See [Note: put back]."""
        if not raw and not self._sealed:
            return self.membership  # no launcher has begun
        try:
            if not raw:
                self._job_store.note_refusal(_MEMBERSHIP, "it was removed")
                raise Refused("it was removed")
            text, count = self._job_store.open_seal(_MEMBERSHIP, raw)
            if count < self._count:
                self._job_store.note_refusal(_MEMBERSHIP, "it is older than what was there before")
                raise Refused("it is older")
            membership = self.membership if raw == self._sealed else Membership.decode(text)
        except (Refused, ValueError):
            if self._sealed:
                self._job_store.compare_set(_MEMBERSHIP, raw, self._sealed)
            elif self._num_foreign >= _FOREIGN_LOOKS:
                self._job_store.compare_set(
                    _MEMBERSHIP, raw, self._job_store.seal(_MEMBERSHIP, self.membership.encode(), 0)
                )
            else:  # if others know a state, they put it back
                self._num_foreign += 1
                self._check(_POLL_S)
            return None
        self.membership, self._sealed, self._count = membership, raw, count
        return membership

    def _give_up_lost(self) -> None:
        membership = self._change(lambda membership: membership)
        lost = self._observer.lost(host.key for host in membership.hosts if host.key != self.host.key)
        if lost:
            self._change(lambda membership: membership.without(lost))

    def _take_part(self) -> None:
        """Wait until a round begins that includes this host."""
        start_s = changed_s = time.monotonic()
        announce_at_s, seen = start_s + _ANNOUNCE_AFTER_S, frozenset[str]()
        self._check_terms()
        self._change(self._joined)
        while True:
            self._give_up_lost()
            self._restore_values(time.monotonic())
            now_s, membership = time.monotonic(), self.membership
            if membership.closed is not None:
                raise JobClosed(membership)
            if membership.is_abandoned:
                self.publish_departure()
                raise StoreLost(f"the launcher that holds the store at {self._config.endpoint} was told to end")
            present = frozenset(host.key for host in membership.members)
            if present != seen:
                seen, changed_s = present, now_s
            if membership.is_running and self.host.key in present and membership.number != self.number:
                return
            if self.host.key not in {host.key for host in membership.hosts}:
                self._change(lambda membership: membership.joined(self.host))  # it had been given up
            elif not membership.is_running and self._may_begin(membership, now_s - changed_s):
                self._begin(membership.members)
                continue
            if now_s > announce_at_s:
                announce_at_s = float("inf")
                say(f"lockstep: {self._describe_wait(membership)}\n")
            self._check_deadline(membership, now_s - start_s)
            self._check(_POLL_S)

    def _joined(self, membership: Membership) -> Membership:
        """The state after this host has left its last round, and joined.

        If it had already joined, and the others have begun since, that is its round.
        """
        if membership.closed is not None:
            return membership
        has_begun = membership.is_running and membership.number > self._last_number
        is_member = any(member.key == self.host.key for member in membership.members)
        return membership if has_begun and is_member else membership.joined(self.host)

    def _begin(self, members: tuple[Host, ...]) -> None:
        """Begin the round with these hosts, unless another launcher has done so, or another host has come."""
        self._change(
            lambda membership: (
                membership.begun() if not membership.is_running and membership.members == members else membership
            )
        )

    def _may_begin(self, membership: Membership, unchanged_s: float) -> bool:
        return membership.is_full or (membership.is_enough and unchanged_s >= self._config.last_call_s)

    def _check_terms(self) -> None:
        if self.membership.terms == self._terms:
            return
        first = next(iter(self.membership.hosts), None)
        theirs, own = self.membership.terms, self._terms
        differences = [
            f"{option} {mine} here and {other} there"
            for option, mine, other in (
                ("--nnodes", _nnodes(own), _nnodes(theirs)),
                ("--max-restarts", own.max_restarts, theirs.max_restarts),
            )
            if mine != other
        ]
        raise LaunchError(
            f"{self.host} and {first or 'the other launchers'} have different options: {', '.join(differences)}; give "
            "all launchers of a job the same"
        )

    def _check_deadline(self, membership: Membership, waited_s: float) -> None:
        namesake = membership.namesake(self.host)
        # A launcher that was killed is given up after a while, and this may be its successor.
        if namesake is not None and waited_s > 2 * self._config.lost_after_s:
            self._change(lambda membership: membership.without([self.host.key]))
            raise LaunchError(
                f"two launchers have --node-rank {self.host.node_rank}: this one ({self.host}) and {namesake}; give "
                f"each host its own number, 0 to {self._terms.max_nodes - 1}"
            )
        is_spare = membership.is_running and not membership.has_room
        if waited_s > self._config.join_s and not is_spare:
            self._change(lambda membership: membership.without([self.host.key]))
            raise LaunchError(
                f"{self._describe_wait(membership)}; they did not come within {self._config.join_s:g} s. Start "
                "`lockstep run` on every host, with the same --nnodes, the same rendezvous endpoint and the same "
                f"--rdzv-id ({self._config.run_id!r} here)"
            )

    def _describe_wait(self, membership: Membership) -> str:
        if membership.is_running and not membership.has_room:
            return f"{self.host} is a spare: the job runs on {len(membership.members)} hosts, and needs no more"
        if membership.is_running:
            return f"{self.host} waits for the hosts of the last round to end their ranks: {_names(membership.members)}"
        return (
            f"{self.host} waits for other hosts at {self._config.endpoint}: {len(membership.members)} of "
            f"{_nnodes(membership.terms)} came ({_names(membership.members)})"
        )


def _read_master(text: str) -> tuple[str, int]:
    """Parse address and port of rank 0, as published by the first host of a round.

    Raises:
        LaunchError: the value is invalid.
    """
    try:
        address, port = json.loads(text)
        if isinstance(address, str) and type(port) is int and 0 < port < 65536:
            return address, port
    except (ValueError, TypeError, RecursionError):
        pass
    raise LaunchError(f"the first host of the round says {text[:60]!r} where rank 0's address and port should be")


def _departure_key(host: Host) -> str:
    return f"farewell/{host.key}"


def _nnodes(terms: JobTerms) -> str:
    return str(terms.min_nodes) if terms.min_nodes == terms.max_nodes else f"{terms.min_nodes}:{terms.max_nodes}"


def _names(hosts: tuple[Host, ...]) -> str:
    return ", ".join(map(str, hosts))
