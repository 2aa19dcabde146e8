"""Which ranks of a group share a host, and at which address each host listens. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.shm.liveness import PeerIdentity

__all__ = ["Layout", "Member"]


@dataclass(frozen=True)
class Member:
    """One rank.

    Attributes:
        identity: its process, and the name of its host.
        host: which host, by the lowest global rank on it.
        address: where its host listens for the others.
        interface: name of the interface with that address.
    """

    identity: PeerIdentity
    host: int
    address: str
    interface: str


@dataclass(frozen=True)
class Layout:
    """The ranks of one group by host.

    Attributes:
        members: one for each rank of the group.
        hosts: the ranks on each host, in order; hosts in the order of their lowest rank.
        host_of: for each rank the index of its host.
        local_rank_of: for each rank its number among those of its host.
        num_channels: in how many parts a large tensor is reduced at a time: as many as the fullest host has ranks.
    """

    members: tuple[Member, ...]
    hosts: tuple[tuple[int, ...], ...]
    host_of: tuple[int, ...]
    local_rank_of: tuple[int, ...]
    num_channels: int

    @classmethod
    def of(cls, members: Sequence[Member]) -> Layout:
        """The layout of these ranks."""
        by_host: dict[int, list[int]] = {}
        for rank, member in enumerate(members):
            by_host.setdefault(member.host, []).append(rank)
        hosts = tuple(tuple(ranks) for ranks in by_host.values())
        host_of, local_rank_of = [0] * len(members), [0] * len(members)
        for host, ranks in enumerate(hosts):
            for local_rank, rank in enumerate(ranks):
                host_of[rank], local_rank_of[rank] = host, local_rank
        return cls(tuple(members), hosts, tuple(host_of), tuple(local_rank_of), max(map(len, hosts)))

    def local_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks on that rank's host, itself included."""
        return self.hosts[self.host_of[rank]]

    def owner(self, host: int, channel: int) -> int:
        """The rank of a host that reduces a channel. With fewer ranks than channels, one owns several."""
        ranks = self.hosts[host]
        return ranks[channel % len(ranks)]

    def channels_of(self, rank: int) -> list[int]:
        """The channels that a rank owns."""
        own = self.host_of[rank]
        return [channel for channel in range(self.num_channels) if self.owner(own, channel) == rank]

    def describe(self) -> str:
        """One line for people: `node1 (ranks 0-1) eth0 10.0.0.1 | …`."""
        parts = []
        for ranks in self.hosts:
            member = self.members[ranks[0]]
            names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            parts.append(f"{member.identity.host} ({names}) {member.interface} {member.address}")
        return " | ".join(parts)
