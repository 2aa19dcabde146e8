"""Transfers large data between the ranks of a group over several hosts, by Gloo.

Only Gloo's sends and receives are used: they go straight from one memory to another without the GIL. The additions and
their order are decided by Lockstep (`wire.py`, `pipeline.py`).

[Note: waits] A thread can wait for a send or receive of Gloo, but not poll it; and a wait that times out closes the
connection for good. So a thread that needs data waits without a deadline, which costs nothing in the normal case, and a
second thread, the `Watchdog`, monitors the peers meanwhile. When a peer fails, the watchdog closes the connections if
no other group uses them, and the waits end with an error. It ends the remaining waits one by one ([Note: waits that no
error ends] in `torch_private/gloo_waits.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lockstep.comm.hosts.gloo_connections import GlooConnections
from lockstep.comm.hosts.gloo_transfers import GlooTransfer, TransferWatcher

__all__ = ["GlooTransport", "is_number"]

_TAGS = 8  # per group
_LARGEST_TAG = (1 << 31) - 1  # torch's limit; reserved by `GlooConnections`
_CLOSE_PATIENCE_S = 2.0


def is_number(number: int) -> bool:
    """Whether a group may have that number: there are tags for two hundred million groups."""
    return number >= 0 and (number + 1) * _TAGS < _LARGEST_TAG


class GlooTransport:
    """Gloo as used by one group. Creation is local.

    Args:
        connections: between the ranks, and possibly others.
        ranks: for each rank of the group, its rank in the group that made the connections.
        number: number of the group among those that use the connections.

    Attributes:
        connections: Gloo's, which other groups may use as well.
    """

    def __init__(self, connections: GlooConnections, ranks: Sequence[int], number: int) -> None:
        self.connections = connections
        connections.open()
        self._ranks = tuple(ranks)
        self._first_tag = number * _TAGS
        self._under_way: set[GlooTransfer] = set()
        self._watchers: dict[int, TransferWatcher] = {}  # by peer
        self._is_closed = False

    def send(self, peer: int, memory: torch.Tensor, tag: int) -> GlooTransfer:
        """Start sending bytes: uint8, contiguous. They must not change until it has finished. Local.

        Args:
            peer: rank in the group.
            memory: the bytes; uint8, contiguous.
            tag: tag within the group, below 8.
        """
        work = self.connections.send(self._ranks[peer], memory, self._first_tag + tag)
        return GlooTransfer(work, (peer,), memory, self._under_way)

    def receive(self, peer: int, memory: torch.Tensor, tag: int) -> GlooTransfer:
        """Start receiving bytes: uint8, contiguous; in the order of the peer's sends with that tag. Local."""
        work = self.connections.receive(self._ranks[peer], memory, self._first_tag + tag)
        return GlooTransfer(work, (peer,), memory, self._under_way)

    def watch(self, transfer: GlooTransfer, on_done: Callable[[], None]) -> GlooTransfer:
        """Wait for a transfer in another thread, and call `on_done` then; meanwhile the caller polls `is_done`. Local.

        A suspended peer must not delay messages from others, so each peer has a separate thread.
        """
        (peer,) = transfer.peers
        if peer not in self._watchers:
            self._watchers[peer] = TransferWatcher()
        self._watchers[peer].watch(transfer, on_done)
        return transfer

    @property
    def is_idle(self) -> bool:
        """Whether everything that was started has finished."""
        return not self._under_way

    def abort(self) -> None:
        """Close the connections, unless other groups use them; in that case the caller ends each wait. Local."""
        if self.connections.num_users == 1:
            self.connections.break_off()

    def close(self, in_good_order: bool) -> None:
        """Release the connections. Local.

        Args:
            in_good_order: whether pending transfers will finish by themselves.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if not in_good_order:
            self.abort()
        for watcher in self._watchers.values():
            watcher.stop()
        if not all(watcher.has_ended(_CLOSE_PATIENCE_S) for watcher in self._watchers.values()):
            self.abort()
            for watcher in self._watchers.values():
                watcher.give_up(_CLOSE_PATIENCE_S)
        if self._under_way:
            self.connections.keep(self._under_way)
        self.connections.close()
