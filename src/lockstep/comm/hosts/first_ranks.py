"""Large sums between hosts: the first rank of each host takes part in an all_reduce of Gloo's own.

[Note: whose ring] Between hosts, the messages of a reduction cost more than its additions, and with many hosts their
number dominates. Gloo's ring runs without Python, and each rank sends to one neighbour only. So for large sums nothing
of ours is as fast, and one ring over hosts is faster than one over all ranks. Two hosts could swap whole sums, in one
step instead of two; but when both directions of a link are saturated, each delays the acknowledgements of the other,
and 4 MiB took 38 to 44 ms at 1 Gbit/s instead of 35.

The order of the ring's additions depends on the position in the tensor: all ranks and all runs get the same bits, but
with more than two hosts not those of the pairwise tree used for smaller tensors. Gloo supports neither our wire formats
nor 32-bit sums of 16-bit numbers; `pipeline.py` does.

[Note: of its own] A ring needs separate connections: two groups may begin their collectives in different orders on
different ranks, and Gloo would confuse their messages. So the connections are made at the first such sum, by ranks that
are all in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lockstep.comm.hosts.gloo_connections import GlooConnections
from lockstep.comm.hosts.gloo_setup import connect_by_gloo
from lockstep.comm.hosts.gloo_transfers import GlooTransfer
from lockstep.comm.hosts.layout import Layout
from lockstep.comm.hosts.link_store import LinkStore
from lockstep.comm.hosts.links import Links
from lockstep.shm import descriptors

__all__ = ["FirstRanks"]

_DESCRIPTORS = 8  # used by a group in addition to one per connection


class FirstRanks:
    """The first ranks of the hosts of one group, as seen by any rank of the group.

    Args:
        rank: this rank in the group.
        layout: which ranks share a host.
        links: the links to all other ranks of the group.
        global_ranks: global rank of each rank of the group.

    Attributes:
        all: the first rank of each host.
        others: the first ranks of the other hosts.
        is_one: whether this rank is the first of its host.
        are_connected: whether `connect` has connected them.
    """

    def __init__(self, rank: int, layout: Layout, links: Links, global_ranks: Sequence[int]) -> None:
        self.all = tuple(ranks[0] for ranks in layout.hosts)
        self._members = [layout.members[one] for one in self.all]
        self._global_ranks = [global_ranks[one] for one in self.all]
        self._links = links
        self._kept: list[Links] = []  # of failed connection attempts
        self.are_connected = False
        self._rank = rank
        self._under_way: set[GlooTransfer] = set()
        self._connections: GlooConnections | None = None
        self.is_one = rank in self.all
        self.others = tuple(one for one in self.all if layout.host_of[one] != layout.host_of[rank])

    def connect(self, timeout_s: float, check_peers: Callable[[], None]) -> None:
        """Connect the first ranks by Gloo. Collective over them only.

        Args:
            timeout_s: seconds until a rank that does not connect is an error.
            check_peers: called while waiting; raises if a rank can no longer come.

        Raises:
            RendezvousError: a host is unreachable.
            RankLost: a rank is gone.
            SetupError: this process has no descriptors left.
        """
        # Gloo kills a process that runs out of descriptors.
        descriptors.require(_DESCRIPTORS + len(self.all), f"rank {self._rank} of the group")
        links = self._links.share(f"first ranks of {self._links.group}", self.all)
        own = self.all.index(self._rank)
        shared = LinkStore(links, own, self._global_ranks, timeout_s, check_peers)
        try:
            self._connections = connect_by_gloo(own, self._members, links, shared)
            self._connections.open()
            shared.share("made", b"")  # No rank leaves before all have read Gloo's keys.
        except BaseException:
            # If this rank left now, the others would report it as lost before they learn what went wrong.
            self._kept.append(links)
            raise
        finally:
            shared.close()
        links.close()
        self.are_connected = True

    def start_sum(self, tensor: torch.Tensor) -> GlooTransfer:
        """Start summing a flat contiguous tensor in place. Collective over the first ranks, after `connect`."""
        assert self._connections is not None
        return GlooTransfer(self._connections.all_reduce(tensor), self.others, tensor, self._under_way)

    @property
    def is_idle(self) -> bool:
        """Whether everything that was started has finished."""
        return not self._under_way

    def abort(self) -> None:
        """Close the connections, which ends the sum under way. Local; any thread may call it."""
        if self._connections is not None:
            self._connections.break_off()

    def close(self, in_good_order: bool) -> None:
        """Release the connections. Local.

        Args:
            in_good_order: whether pending transfers will finish by themselves.
        """
        for links in self._kept:
            links.close()
        self._kept.clear()
        if self._connections is None:
            return
        if not in_good_order:
            self.abort()
        if self._under_way:
            self._connections.keep(self._under_way)
        self._connections.close()
        self._connections, self.are_connected = None, False
