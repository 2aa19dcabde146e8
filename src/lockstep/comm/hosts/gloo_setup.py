"""Connects ranks of several hosts by Gloo, once links between them exist. Collective."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from typing import Any

from lockstep.comm.hosts.gloo_connections import GlooConnections
from lockstep.comm.hosts.layout import Member
from lockstep.comm.hosts.link_store import LinkStore
from lockstep.comm.hosts.links import Links
from lockstep.errors import RendezvousError
from lockstep.network_interfaces import interfaces, source_towards

__all__ = ["connect_by_gloo", "read_json"]


def connect_by_gloo(rank: int, members: Sequence[Member], links: Links, shared: LinkStore) -> GlooConnections:
    """Connect to all other ranks by Gloo, over new connections. Collective.

    Args:
        rank: this rank, among those that connect.
        members: the ranks that connect.
        links: the links between them.
        shared: a store over these links.

    Raises:
        RendezvousError: a host is unreachable.
        RankLost: a rank is gone.
    """
    admitted = _addresses_of_all(shared, links, members, rank)
    address = members[rank].address
    return GlooConnections(
        shared, rank, len(members), address, admitted, shared.remaining_s(), check_peers=shared.check_peers
    )


def read_json(data: bytes) -> Any:
    """Parse what a rank has sent; None if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _addresses_of_all(shared: LinkStore, links: Links, members: Sequence[Member], rank: int) -> frozenset[str] | None:
    """The addresses from which the ranks may connect by Gloo; None if addresses are translated on the way.

    Collective. With Gloo, the kernel chooses the address from which a host connects.
    """
    towards = {source_towards(one.address) for one in members}
    own = sorted({one.address for one in interfaces()} | {source for source in towards if source is not None})
    sources = links.sources()
    is_as_published = all(_is_same(source, members[peer].address) for peer, source in sources.items())
    found = shared.share("ready", json.dumps([is_as_published, own]).encode())
    published = [_read_ready(value, peer) for peer, value in found.items()]
    if not is_as_published or not all(is_so for is_so, _ in published):
        return None
    return frozenset(own).union(*(addresses for _, addresses in published))


def _read_ready(data: bytes, peer: int) -> tuple[bool, list[str]]:
    """Parse whether a rank sees all others at their published addresses, and from which addresses it may connect.

    Raises:
        RendezvousError: the data cannot come from a rank.
    """
    match read_json(data):
        case [bool(is_as_published), list(addresses)] if all(isinstance(one, str) for one in addresses):
            return is_as_published, addresses
    raise RendezvousError(f"rank {peer} of the group sent invalid data about its addresses: {data[:60]!r}")


def _is_same(address: str, other: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]) == ipaddress.ip_address(other.partition("%")[0])
