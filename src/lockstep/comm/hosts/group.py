"""Connects the ranks of a new group over several hosts, and creates its engine.

In this order: discovery, connections, shared memory of each host, Gloo.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lockstep import env
from lockstep.comm.engine import Engine
from lockstep.comm.flight_recorder import FlightRecorder
from lockstep.comm.group_setup import NewGroup
from lockstep.comm.hosts.algorithms import HostsAlgorithms
from lockstep.comm.hosts.discovery import find_members
from lockstep.comm.hosts.gloo_connections import GlooConnections
from lockstep.comm.hosts.gloo_setup import connect_by_gloo, read_json
from lockstep.comm.hosts.gloo_transport import GlooTransport, is_number
from lockstep.comm.hosts.layout import Layout
from lockstep.comm.hosts.link_store import LinkStore
from lockstep.comm.hosts.links import Links
from lockstep.comm.hosts.mailbox import HostsMailbox
from lockstep.comm.hosts.peer_listener import PeerListener
from lockstep.comm.hosts.store_exchange import StoreExchange
from lockstep.comm.hosts.team import HostsTeam
from lockstep.comm.messages.message_engine import MessageEngine
from lockstep.comm.shared_memory import make_engine
from lockstep.comm.wire import current_wire
from lockstep.errors import LockstepError, RendezvousError, SetupError
from lockstep.log import get_logger, warn_once
from lockstep.secret import remarks_on, secret_of_ranks
from lockstep.shm import descriptors
from lockstep.shm.bootstrap import Bootstrap, SeveralHosts
from lockstep.shm.team import SharedMemoryTeam
from lockstep.shm.terms import common_terms, disagreement

__all__ = ["HostsEngine", "connect"]

_DESCRIPTORS = 16


class HostsEngine(MessageEngine):
    """The op table of a group on several hosts, which shares its connections with further groups.

    Args:
        team: the ranks of the group.
        new: what this rank knew about the group beforehand.
    """

    def __init__(self, team: HostsTeam, new: NewGroup) -> None:
        recorder, make_mailbox = FlightRecorder(team, new.name, new.ranks), functools.partial(HostsMailbox, team)
        super().__init__(team, recorder, new.timeout_s, HostsAlgorithms(team), make_mailbox, RuntimeError)
        self._hosts_team = team

    def connect_further(self, new: NewGroup, bootstrap: Bootstrap, check_peers: Callable[[], None]) -> Engine | None:
        """Connect a further group over this group's connections; in shared memory, if it has one host. Collective.

        Args:
            new: the further group; this group is the default group.
            bootstrap: of the ranks of the further group, as if they shared one host.
            check_peers: called while waiting; raises if a rank can no longer come.

        Returns:
            The engine of the further group; None if some of its ranks are not in this group.

        Raises:
            RendezvousError: a rank did not come, or could not; names it.
            RankLost: a rank came and died.
            SetupError: the ranks' handshake parameters differ, such as wire formats, or no descriptors are left.
            SharedMemoryError: a host cannot allocate shared memory.
        """
        team = self._hosts_team
        if max(new.ranks) >= team.world_size:
            return None
        layout = Layout.of([team.layout.members[rank] for rank in new.ranks])
        if len(layout.hosts) == 1:
            with contextlib.suppress(SeveralHosts):
                return make_engine(SharedMemoryTeam.connect(bootstrap), new)
        return _connect_over(team, layout, new, check_peers)


def connect(new: NewGroup, check_peers: Callable[[], None]) -> Engine:
    """Connect the ranks of a new group, possibly on several hosts, that have no connections yet. Collective.

    Args:
        new: what this rank knows about the group.
        check_peers: called while waiting; raises if a rank can no longer come.

    Returns:
        The engine of the group; one in shared memory, if all ranks turn out to be on one host.

    Raises:
        RendezvousError: a rank did not come, or a host is unreachable.
        RankLost: a rank came and died.
        SetupError: the ranks' handshake parameters differ, such as wire formats, or no descriptors are left.
        SharedMemoryError: a host cannot allocate shared memory.
    """
    exchange = StoreExchange(new.store, new.rank, new.ranks, new.timeout_s, check_peers)
    try:
        # Two connections to each other rank, and their epoll descriptors. Gloo kills a process without descriptors.
        descriptors.require(_DESCRIPTORS + 2 * len(new.ranks), f"rank {new.ranks[new.rank]}")
        members = find_members(exchange, new.rank, len(new.ranks))
        layout = Layout.of(members)
        is_one_host = len(layout.hosts) == 1
        links = None if is_one_host else _open_links(exchange, new.rank, new.ranks, members[new.rank].address)
    except LockstepError as error:
        exchange.give_up(error)
        raise
    bootstrap = _bootstrap_on_host(new, layout, check_peers)
    if links is None:
        engine: Engine = make_engine(SharedMemoryTeam.connect(bootstrap), new)
    else:
        shared = LinkStore(links, new.rank, new.ranks, exchange.remaining_s(), check_peers)
        with _failures_published(shared, links):
            make_gloo = functools.partial(_connect_gloo, new, layout, links, shared)
            engine = _make(new, layout, links, shared, bootstrap, make_gloo)
    exchange.erase()
    if links is not None and new.is_default and new.rank == 0:
        _announce(layout)
    return engine


def _connect_over(team: HostsTeam, layout: Layout, new: NewGroup, check_peers: Callable[[], None]) -> Engine:
    """Connect ranks of several hosts over the connections of the default group. Collective.

    Args:
        team: of the default group. The new group uses its links, and its Gloo connections if all ranks can share them.
        layout: of the new group.
        new: what this rank knows about the group.
        check_peers: called while waiting; raises if a rank can no longer come.
    """
    try:
        own = team.links.share(new.name, new.ranks)
    except OSError as error:
        raise SetupError(f"rank {new.ranks[new.rank]} cannot join a new group: {error}") from None
    shared = LinkStore(own, new.rank, new.ranks, new.timeout_s, check_peers)
    with _failures_published(shared, own):
        number = _agree_on_terms(shared, new, team.gloo)
        if number is None:
            make_gloo = functools.partial(_connect_gloo, new, layout, own, shared)
        else:
            make_gloo = functools.partial(GlooTransport, team.gloo, new.ranks, number)
        return _make(new, layout, own, shared, _bootstrap_on_host(new, layout, check_peers), make_gloo)


@contextlib.contextmanager
def _failures_published(shared: LinkStore, links: Links) -> Iterator[None]:
    """If this rank fails while the group is being created, send the others the reason."""
    try:
        yield
    except BaseException as error:
        shared.give_up(error)
        links.close()
        raise


def _agree_on_terms(shared: LinkStore, new: NewGroup, gloo: GlooConnections) -> int | None:
    """The group's number among those that share Gloo's connections, as assigned by its first rank. Collective.

    Returns:
        None if the group needs new connections, because some rank cannot share the existing ones.

    Raises:
        SetupError: this rank or another one cannot join, or the ranks' handshake parameters differ.
    """
    name, terms = f"rank {new.ranks[new.rank]}", _terms()
    descriptors.require(_DESCRIPTORS + len(new.ranks), name)
    number = None
    if gloo.can_be_shared:
        number = gloo.number() if new.rank == 0 else 0
    own = {"terms": terms, "number": number if number is None or is_number(number) else None}
    published: dict[int, dict[str, Any]] = {new.rank: own}
    for peer, value in shared.share("terms", json.dumps(own).encode()).items():
        published[peer] = _read_terms(value, f"rank {new.ranks[peer]}")
        different = disagreement(name, terms, f"rank {new.ranks[peer]}", published[peer]["terms"])
        if different is not None:
            raise different
    found: int | None = published[0]["number"]
    return None if any(one["number"] is None for one in published.values()) else found


def _read_terms(data: bytes, name: str) -> dict[str, Any]:
    """Parse a rank's handshake parameters and the number that it assigns to the group, or None.

    Raises:
        RendezvousError: the data cannot come from a rank.
    """
    found = read_json(data)
    if not isinstance(found, dict) or "terms" not in found or type(found.get("number")) not in (int, type(None)):
        raise RendezvousError(f"{name} sent invalid data about a new group: {data[:60]!r}")
    return found


def _terms() -> dict[str, Any]:
    """The handshake parameters: what must be the same on all ranks."""
    return common_terms() | {"wire": current_wire().name}


def _bootstrap_on_host(new: NewGroup, layout: Layout, check_peers: Callable[[], None]) -> Bootstrap:
    """The bootstrap for the ranks on this host."""
    return Bootstrap(
        new.store.below(f"host {layout.members[new.rank].host}"),
        layout.local_rank_of[new.rank],
        [new.ranks[peer] for peer in layout.local_ranks(new.rank)],
        new.timeout_s,
        check_peers,
        {"wire": current_wire().name},
    )


def _make(
    new: NewGroup,
    layout: Layout,
    links: Links,
    shared: LinkStore,
    bootstrap: Bootstrap,
    make_gloo: Callable[[], GlooTransport],
) -> Engine:
    """Create the engine once the ranks have links. Collective."""
    segment = SharedMemoryTeam.meet(bootstrap)
    # Only now: no rank should wait in Gloo for one that could not allocate its host's memory.
    gloo = make_gloo()
    try:
        # No rank begins before all are here, so a rank that fails up to this point is not reported as lost.
        shared.share("made", b"")
        shared.close()
    except BaseException:
        gloo.close(in_good_order=False)
        raise
    team = HostsTeam(new.rank, layout, links, segment, gloo, current_wire(), new.timeout_s, new.ranks)
    return HostsEngine(team, new)


def _connect_gloo(new: NewGroup, layout: Layout, links: Links, shared: LinkStore) -> GlooTransport:
    """Connect by Gloo, over new connections. Collective."""
    return GlooTransport(connect_by_gloo(new.rank, layout.members, links, shared), range(len(new.ranks)), 0)


def _open_links(exchange: StoreExchange, rank: int, ranks: Sequence[int], address: str) -> Links:
    """Connect to all other ranks. Collective."""
    terms = _terms()
    listener = PeerListener(address)
    try:
        exchange.write("endpoint", [*listener.endpoint, terms])
        found = exchange.read("endpoint", range(len(ranks)))
    except BaseException:
        listener.close()
        raise
    try:
        endpoints = {peer: (str(one[0]), int(one[1]), str(one[2])) for peer, one in enumerate(found)}
        theirs = [one[3] for one in found]
    except (TypeError, ValueError, KeyError, IndexError):
        listener.close()
        raise RendezvousError(f"a rank published an invalid endpoint: {str(found)[:200]}") from None
    for peer, other in enumerate(theirs):
        error = disagreement(f"rank {ranks[rank]}", terms, f"rank {ranks[peer]}", other)
        if error is not None:
            listener.close()
            exchange.part(range(len(ranks)))
            raise error
    del endpoints[rank]
    return listener.connect(rank, endpoints, exchange.remaining_s(), exchange.check_peers)


def _announce(layout: Layout) -> None:
    """Print one line that lists the hosts and how they reach each other. Called by one rank."""
    print(f"[lockstep] {len(layout.hosts)} hosts: {layout.describe()}", file=sys.stderr, flush=True)
    for remark in remarks_on(env.LOCKSTEP_TOKEN.get()):
        warn_once(get_logger(__name__), remark)
    is_said = env.LOCKSTEP_RENDEZVOUS.get() is not None  # our launcher has already reported the missing token
    if not secret_of_ranks().is_given and not is_said:
        warn_once(
            get_logger(__name__),
            "these ranks have no token (LOCKSTEP_TOKEN), so anyone who reaches the port where they meet can disturb "
            "or impersonate them; docs/security.md says how to set one",
        )
