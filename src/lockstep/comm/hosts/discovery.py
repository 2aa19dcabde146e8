"""Determines which ranks of a new group share a host, and at which address each host listens.

Ranks share a host if they have the same boot id and process ids, or if one can open the other's shared memory segment:
two containers on one machine that share neither are two hosts.

Then the first rank of each host listens on every address that others might reach (`network_interfaces.py`), and probes
the addresses of all other hosts. A host's address is the one that most others reach; ties are broken by the host's own
order. A host that nobody reaches is an error that names what was tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from lockstep import env
from lockstep.comm.hosts.layout import Member
from lockstep.comm.hosts.store_exchange import StoreExchange
from lockstep.errors import RendezvousError, SharedMemoryError
from lockstep.json_records import record_of
from lockstep.network_interfaces import ProbeListener, candidates, reachable
from lockstep.shm.liveness import PeerIdentity, own_identity
from lockstep.shm.segment import PAGE_BYTES, Segment, boot_id

__all__ = ["find_members"]

_Endpoint = tuple[str, str, int]  # interface, address, port
_Said = TypeVar("_Said")


@dataclass(frozen=True)
class _RankInfo:
    """What a rank publishes about itself."""

    identity: PeerIdentity
    boot_id: str
    handle: str


@dataclass(frozen=True)
class _Listener:
    """What the first rank of a host publishes: interface, address and port of each of its listeners."""

    nonce: str
    endpoints: tuple[_Endpoint, ...]


def _read(kind: type[_Said], found: Any) -> _Said:
    """Parse what a rank publishes about itself, into an object of that class."""
    try:
        return record_of(kind, found)
    except ValueError:
        raise _nonsense(found) from None


def _read_listener(found: Any) -> _Listener:
    listener = _read(_Listener, found)
    if not all(0 < port < 65536 for _, _, port in listener.endpoints):
        raise _nonsense(found)
    return listener


def _read_first(found: Any, world_size: int) -> int:
    """Parse a rank's statement of the first rank of its host."""
    if type(found) is not int or not 0 <= found < world_size:
        raise _nonsense(found)
    return found


def _read_reached(found: Any) -> dict[str, list[int]]:
    """Parse, for each host as a text, the indices of its endpoints that a host reaches."""
    is_typed = isinstance(found, dict) and all(
        isinstance(indices, list) and all(type(index) is int for index in indices) for indices in found.values()
    )
    if not is_typed:
        raise _nonsense(found)
    return dict(found)


def _nonsense(found: Any) -> RendezvousError:
    return RendezvousError(f"a rank published invalid data about itself: {str(found)[:60]!r}")


def find_members(exchange: StoreExchange, rank: int, world_size: int) -> list[Member]:
    """Find out on which host each rank of a new group is. Collective.

    Raises:
        RendezvousError: a rank did not come, or a host is unreachable.
    """
    everyone = range(world_size)
    segment = Segment.create(PAGE_BYTES)  # others try whether they can open it
    try:
        own = _RankInfo(own_identity(), boot_id(), segment.handle)
        exchange.write("info", asdict(own))
        infos = [_read(_RankInfo, found) for found in exchange.read("info", everyone)]
        exchange.write("first", _first_on_host(own, infos, rank))
        first = [_read_first(found, world_size) for found in exchange.read("first", everyone)]
    finally:
        segment.release()
    hosts = sorted(set(first))
    addresses = (
        _find_addresses(exchange, rank, hosts, [infos[host].identity.host for host in hosts]) if len(hosts) > 1 else {}
    )
    return [
        Member(info.identity, host, *addresses.get(host, ("", ""))) for info, host in zip(infos, first, strict=True)
    ]


def _first_on_host(own: _RankInfo, infos: Sequence[_RankInfo], rank: int) -> int:
    """The lowest rank that shares a host with this one."""
    for peer, info in enumerate(infos[:rank]):
        if info.boot_id != own.boot_id:
            continue
        if info.identity.pid_namespace == own.identity.pid_namespace:
            return peer
        try:
            Segment.attach(info.handle, size_bytes=PAGE_BYTES).release()
        except SharedMemoryError:
            continue
        return peer
    return rank


def _find_addresses(
    exchange: StoreExchange, rank: int, hosts: Sequence[int], names: Sequence[str]
) -> dict[int, tuple[str, str]]:
    """Find the address and interface of each host, by its first rank. Collective."""
    endpoints, reached = _probe(exchange, rank, hosts)
    named = dict(zip(hosts, names, strict=True))
    chosen: dict[int, tuple[str, str]] = {}
    for host in hosts:
        votes = [sum(index in found.get(str(host), ()) for found in reached) for index in range(len(endpoints[host]))]
        if not votes or max(votes) < len(hosts) - 1:
            raise _unreachable(host, endpoints[host], dict(zip(hosts, reached, strict=True)), named)
        interface, address, _ = endpoints[host][votes.index(max(votes))]
        chosen[host] = (address, interface)
    return chosen


def _probe(
    exchange: StoreExchange, rank: int, hosts: Sequence[int]
) -> tuple[dict[int, Sequence[_Endpoint]], list[dict[str, list[int]]]]:
    """Each host tries the endpoints of all others. Collective.

    Returns:
        The endpoints of each host, by its first rank; and for each host, in the order of `hosts`, the indices of the
        endpoints that it reached, by the first rank of the other host (as text).
    """
    listener: ProbeListener | None = None
    try:
        if rank in hosts:
            listener = ProbeListener(candidates(env.snapshot()))
            exchange.write("probe", {"nonce": listener.nonce, "endpoints": listener.endpoints})
        listeners = {
            host: _read_listener(found) for host, found in zip(hosts, exchange.read("probe", hosts), strict=True)
        }
        if rank in hosts:
            others = {
                host: (found.nonce, [(address, port) for _, address, port in found.endpoints])
                for host, found in listeners.items()
                if host != rank
            }
            exchange.write("reached", reachable(others))
        reached = [_read_reached(found) for found in exchange.read("reached", hosts)]
    finally:
        if listener is not None:
            listener.close()
    return {host: found.endpoints for host, found in listeners.items()}, reached


def _unreachable(
    host: int,
    endpoints: Sequence[_Endpoint],
    reached: Mapping[int, Mapping[str, Sequence[int]]],
    names: Mapping[int, str],
) -> RendezvousError:
    """The error for a host that others cannot reach, or not all at the same address."""
    name = names[host]
    deaf = [names[other] for other, found in reached.items() if not found.get(str(host)) and names[other] != name]
    tried = ", ".join(f"{interface} {address}" for interface, address, _ in endpoints) or "no address"
    return RendezvousError(
        f"host {name} cannot be reached from {', '.join(deaf) or 'all others at one address'}; tried {tried}. "
        "Is there a firewall between them? GLOO_SOCKET_IFNAME chooses the network interface"
    )
