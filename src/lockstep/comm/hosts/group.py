"""Makes a group over several hosts, and its engine."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence

from lockstep import env
from lockstep.comm.flight_recorder import FlightRecorder
from lockstep.comm.group_setup import BootstrapStore
from lockstep.comm.hosts import algorithms
from lockstep.comm.hosts.discovery import find_members
from lockstep.comm.hosts.gloo_transport import GlooTransport
from lockstep.comm.hosts.layout import Layout, Member
from lockstep.comm.hosts.links import Links
from lockstep.comm.hosts.mailbox import HostsMailbox
from lockstep.comm.hosts.peer_listener import PeerListener
from lockstep.comm.hosts.store_exchange import StoreExchange
from lockstep.comm.hosts.team import HostsTeam
from lockstep.comm.message_engine import MessageEngine
from lockstep.comm.wire import current_wire
from lockstep.errors import InputError, LockstepError, RankLost, RendezvousError
from lockstep.log import get_logger, warn_once
from lockstep.secret import secret_of_ranks
from lockstep.shm.bootstrap import Bootstrap
from lockstep.shm.team import Team
from lockstep.shm.terms import common_terms, disagreement
from lockstep.torch_private.stores import PrefixStore

__all__ = ["HostsEngine", "announce", "connect", "known_members"]

_READY = b"ready   "
_POLL_S = 0.005


class HostsEngine(MessageEngine):
    """The op table of a group over several hosts.

    Args:
        team: the ranks of the group.
        recorder: its flight recorder.
        timeout_s: default seconds until a rank that does not come is an error.
    """

    def __init__(self, team: HostsTeam, recorder: FlightRecorder, timeout_s: float) -> None:
        super().__init__(team, recorder, timeout_s, algorithms, functools.partial(HostsMailbox, team), RuntimeError)
        self.hosts_team = team
        self._part = team.local.rank

    def run_steps(self, key: object, describe: Callable[[], str], between: Callable[[], None]) -> None:
        """Refuse protocols over a region of one host's memory: the ranks are on several hosts.

        Raises:
            InputError: always.
        """
        raise InputError("a group over several hosts has no memory that all its ranks share")


def known_members(default_group: object, ranks: Sequence[int]) -> list[Member] | None:
    """The members of these global ranks, if the default group is one over several hosts; None otherwise."""
    engine = getattr(default_group, "engine", None)
    if not isinstance(engine, HostsEngine):
        return None
    members = engine.hosts_team.layout.members
    return [members[rank] for rank in ranks] if max(ranks) < len(members) else None


def connect(
    store: BootstrapStore,
    rank: int,
    ranks: Sequence[int],
    timeout_s: float,
    check_peers: Callable[[], None],
    known: list[Member] | None,
) -> Team | HostsTeam:
    """Connect the ranks of a new group that may be on several hosts. Collective.

    Args:
        store: through which the ranks find each other; nobody else uses its keys.
        rank: this rank in the group.
        ranks: the global rank of each rank of the group.
        timeout_s: until a rank that does not come is an error.
        check_peers: called while waiting; raises if a rank cannot come.
        known: the members, if another group knows them already.

    Returns:
        A team of shared memory after all, where all turn out to be on one host.

    Raises:
        RendezvousError: a rank did not come, or a host cannot be reached.
        RankLost: a rank came and died.
        SetupError: the ranks go by different terms, such as wire formats.
        SharedMemoryError: the memory of a host cannot be had.
    """
    exchange = StoreExchange(store, rank, ranks, timeout_s, check_peers)
    try:
        return _connect(exchange, store, rank, ranks, timeout_s, check_peers, known)
    except LockstepError as error:
        exchange.give_up(error)
        raise


def _connect(
    exchange: StoreExchange,
    store: BootstrapStore,
    rank: int,
    ranks: Sequence[int],
    timeout_s: float,
    check_peers: Callable[[], None],
    known: list[Member] | None,
) -> Team | HostsTeam:
    members = known or find_members(exchange, rank, len(ranks))
    layout = Layout.of(members)
    here = layout.local_ranks(rank)
    bootstrap = Bootstrap(
        store.below(f"host {members[rank].host}"),
        layout.local_rank_of[rank],
        [ranks[peer] for peer in here],
        timeout_s,
        check_peers,
        {"wire": current_wire().name},
    )
    if len(layout.hosts) == 1:
        team = Team.connect(bootstrap)
        exchange.erase()
        return team
    links, token = _open_links(exchange, rank, ranks, members[rank].address, check_peers)
    try:
        local = Team.connect(bootstrap)
        _await_ready(links, ranks, rank, exchange.remaining_s(), check_peers)
        below = PrefixStore(token, store.torch_store)
        gloo = GlooTransport(below, rank, len(ranks), members[rank].address, exchange.remaining_s())
    except BaseException:
        links.close()
        raise
    exchange.erase()
    return HostsTeam(rank, layout, links, local, gloo, current_wire())


def _open_links(
    exchange: StoreExchange, rank: int, ranks: Sequence[int], address: str, check_peers: Callable[[], None]
) -> tuple[Links, str]:
    """Connect to all other ranks; also returns a word that only this group knows. Collective."""
    terms = common_terms() | {"wire": current_wire().name}
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
        raise RendezvousError(f"a rank says of its endpoint what no rank says: {str(found)[:200]}") from None
    for peer, other in enumerate(theirs):
        error = disagreement(f"rank {ranks[rank]}", terms, f"rank {ranks[peer]}", other)
        if error is not None:
            listener.close()
            exchange.part(range(len(ranks)))
            raise error
    token = endpoints[0][2]
    del endpoints[rank]
    return listener.connect(rank, endpoints, exchange.remaining_s(), check_peers), token


def _await_ready(
    links: Links, ranks: Sequence[int], rank: int, timeout_s: float, check_peers: Callable[[], None]
) -> None:
    """Wait until the memory of all hosts is there, because the next step cannot be cut short.

    Raises:
        RankLost: a rank is gone.
    """
    waiting = {peer for peer in range(len(ranks)) if peer != rank}
    deadline = time.monotonic() + timeout_s
    for peer in waiting:
        links.send(peer, _READY)
    while waiting:
        waiting -= {peer for peer, message in links.poll() if bytes(message) == _READY}
        gone = sorted(links.lost & waiting)
        if gone or time.monotonic() > deadline:
            late = gone or sorted(waiting)
            names = ", ".join(f"rank {ranks[peer]}" for peer in late)
            what = "was gone again" if gone else "did not go on"
            raise RankLost(f"{names} came and {what} while the group was being made", tuple(ranks[one] for one in late))
        check_peers()
        links.wait(_POLL_S)


def announce(team: HostsTeam) -> None:
    """Say in one line which hosts there are, and how they reach each other. By one rank."""
    print(f"[lockstep] {len(team.layout.hosts)} hosts: {team.layout.describe()}", file=sys.stderr, flush=True)
    is_said = env.LOCKSTEP_RENDEZVOUS.get() is not None  # our launcher has said that there is no token
    if not secret_of_ranks().is_given and not is_said:
        warn_once(
            get_logger(__name__),
            "these ranks have no token (LOCKSTEP_TOKEN), so whoever reaches the port where they meet can disturb them "
            "or pass for one; docs/security.md says how to give them one",
        )
