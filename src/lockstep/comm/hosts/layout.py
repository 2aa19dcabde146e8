"""Which ranks of a group share a host, where each host listens, and in what pieces tensors move. Pure data.

[Note: chunks] A large tensor passes through its stages (`pipeline.py`) in chunks, so that the stages of one overlap
those of the next. Each chunk costs an owner one message with two hosts, and 2 (H - 1) messages with H hosts. An
all_reduce of 4 MiB in 8 chunks took 2.7 times as long as in one at 4 hosts of one rank on a fast network, and 4.2 times
as long at 8. So with more than two hosts, tensors are cut only as far as memory requires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.shm.liveness import PeerIdentity
from lockstep.topology import name_ranks

__all__ = [
    "LARGEST_CHUNK_BYTES",
    "Layout",
    "Member",
    "halved_bytes",
    "is_summed_by_first_ranks",
    "num_chunks",
    "num_partners",
    "num_pieces_of_sum",
    "redundant_bytes",
]

LARGEST_CHUNK_BYTES = 16 << 20
_SMALLEST_CHUNK_BYTES = 2 << 20
_CHUNKS_OF_TWO_HOSTS = 4
# Up to this size every rank does all the additions: one message to each host instead of a pipeline.
_REDUNDANT_BYTES = 16 << 10
# The same for two hosts, and for partners that swap sums; for all ranks of a host together, as each sends everything.
_DOUBLED_BYTES = 64 << 10
# Chunks up to this size are halved between partners. See [Note: halving] in `pipeline.py`.
_HALVED_BYTES = 2 << 20
# Beyond this size Gloo sums over the hosts. See [Note: whose ring] in `first_ranks.py`.
_OURS_BYTES = 2 << 20
_PIECE_OF_SUM_BYTES = 8 << 20


@dataclass(frozen=True)
class Member:
    """One rank.

    Attributes:
        identity: its process, and the name of its host.
        host: its host, identified by the lowest global rank on it.
        address: the address on which its host listens for the others.
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
        host_of: index of each rank's host.
        local_rank_of: each rank's number among the ranks of its host.
        is_one_tree: whether a pairwise tree over each host's ranks and then over hosts equals the tree over all ranks.
        num_channels: number of parts of a large tensor that are reduced in parallel: the ranks of the fullest host.
    """

    members: tuple[Member, ...]
    hosts: tuple[tuple[int, ...], ...]
    host_of: tuple[int, ...]
    local_rank_of: tuple[int, ...]
    num_channels: int
    is_one_tree: bool

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
        sizes = set(map(len, hosts))
        is_one_tree = len(sizes) == 1 and max(sizes).bit_count() == 1
        return cls(tuple(members), hosts, tuple(host_of), tuple(local_rank_of), max(sizes), is_one_tree)

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

    @property
    def has_partners(self) -> bool:
        """Whether there are 4, 8, 16, … hosts, which can exchange in pairs. See [Note: halving] in `pipeline.py`."""
        return num_partners(len(self.hosts)) > 0

    def partners_of(self, host: int) -> list[int]:
        """The hosts with which a host exchanges, in order: the next, the next but one, …

        >>> Layout((), ((0,), (1,), (2,), (3,)), (0, 1, 2, 3), (0, 0, 0, 0), 1, True).partners_of(1)
        [0, 3]
        """
        return [host ^ 1 << step for step in range((len(self.hosts) - 1).bit_length())]

    def describe(self) -> str:
        """A one-line description: `node1 (ranks 0-1) eth0 10.0.0.1 | …`."""
        parts = []
        for ranks in self.hosts:
            member = self.members[ranks[0]]
            parts.append(f"{member.identity.host} ({name_ranks(ranks)}) {member.interface} {member.address}")
        return " | ".join(parts)


def num_partners(num_hosts: int) -> int:
    """Number of hosts with which a host swaps sums, one after the other; 0 if it does not.

    >>> [num_partners(hosts) for hosts in (1, 2, 3, 4, 6, 8)]
    [0, 0, 0, 2, 0, 3]
    """
    return num_hosts.bit_length() - 1 if num_hosts > 2 and num_hosts.bit_count() == 1 else 0


def redundant_bytes(num_hosts: int, num_channels: int, is_exact: bool = True) -> int:
    """The largest tensor, in bytes, that every rank sums completely instead of a share of it.

    Args:
        num_hosts: at least 2.
        num_channels: ranks of the fullest host.
        is_exact: whether sums are sent in full precision.

    >>> [redundant_bytes(hosts, 2) >> 10 for hosts in (2, 3, 4)], redundant_bytes(2, 1, is_exact=False) >> 10
    ([32, 16, 32], 16)
    """
    is_doubled = is_exact and (num_hosts == 2 or num_partners(num_hosts) > 0)
    return _DOUBLED_BYTES // num_channels if is_doubled else _REDUNDANT_BYTES


def halved_bytes(num_hosts: int) -> int:
    """The largest chunk, in bytes, that partners halve; 0 if hosts have no partners.

    >>> [halved_bytes(hosts) >> 20 for hosts in (2, 4, 6, 8)]
    [0, 2, 0, 2]
    """
    return _HALVED_BYTES if num_partners(num_hosts) else 0


def is_summed_by_first_ranks(num_bytes: int) -> bool:
    """Whether a tensor of that size is summed by the first ranks of the hosts, if Gloo supports the sum.

    >>> is_summed_by_first_ranks(4 << 20), is_summed_by_first_ranks(1 << 20)
    (True, False)
    """
    return num_bytes > _OURS_BYTES


def num_pieces_of_sum(num_bytes: int) -> int:
    """Number of pieces in which such a tensor is summed if hosts have several ranks. See `large_sums.py`.

    >>> num_pieces_of_sum(4 << 20), num_pieces_of_sum(25 << 20)
    (1, 4)
    """
    return -(-num_bytes // _PIECE_OF_SUM_BYTES)


def num_chunks(num_bytes: int, num_hosts: int, largest_bytes: int = LARGEST_CHUNK_BYTES) -> int:
    """Number of chunks in which a large tensor passes through the stages of a reduction. See [Note: chunks].

    Args:
        num_bytes: of the tensor; at least 1.
        num_hosts: at least 2.
        largest_bytes: of a chunk.

    >>> num_chunks(1 << 20, 2), num_chunks(4 << 20, 2), num_chunks(25 << 20, 2)
    (1, 2, 4)
    >>> num_chunks(4 << 20, 3), num_chunks(25 << 20, 3), num_chunks(25 << 20, 3, largest_bytes=2 << 20)
    (1, 2, 13)
    """
    wanted = max(1, min(_CHUNKS_OF_TWO_HOSTS, num_bytes // _SMALLEST_CHUNK_BYTES)) if num_hosts == 2 else 1
    return max(wanted, -(-num_bytes // largest_bytes))
