"""Gloo's connections between this process and the other ranks, one for each pair, shared by several groups.

[Note: shared Gloo] The default group connects its ranks by Gloo; groups created later send and receive over the same
connections, with separate tags. So a further group needs no time to connect, no descriptors and no threads. A group
that gives up must not close connections that others use. It ends its own waits ([Note: waits that no error ends] in
`torch_private/gloo_waits.py`), and keeps the memory of unfinished transfers until the connections are closed, because
Gloo may still write to it. With a torch in which waits cannot be ended, each group makes its own connections.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.hosts.gloo_port_filter import GlooPortFilter
from lockstep.comm.torch_version import joins_gloo_with_gil
from lockstep.errors import LockstepError, RendezvousError
from lockstep.torch_private.gloo_waits import can_end_waits
from lockstep.torch_private.groups import gloo_group
from lockstep.torch_private.stores import Store

__all__ = ["GlooConnections"]

_AT_ONCE, _FOREVER = timedelta(milliseconds=1), timedelta(days=30)
_BREAK_OFF_TAG = (1 << 31) - 1  # the largest; no group uses it
_LOOK_EVERY_S = 0.01
_REASON_FOLLOWS_WITHIN_S = 0.5


class _Refused:
    """A send or receive that could not start because the connection is gone; its `wait` raises that error."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, _: timedelta) -> bool:
        raise self._error


class _ClosedGroup:
    """Replaces the group once it is closed: every operation raises."""

    def send(self, *_: object) -> None:
        raise RuntimeError("the group is closed")

    recv = allreduce = send


def _explain(check_peers: Callable[[], None]) -> None:
    """Raise if a rank is gone; its end may be noticed a moment later than by Gloo."""
    until_s = time.monotonic() + _REASON_FOLLOWS_WITHIN_S
    while time.monotonic() < until_s:
        check_peers()
        time.sleep(_LOOK_EVERY_S)


class _Connecting:
    """Creates a Gloo group in a separate thread, because Gloo waits for a dead rank five times as long as it should.

    Args:
        make: connects to all other ranks by Gloo, and returns torch's group.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="lockstep-gloo-connect", daemon=True).start()

    def _run(self) -> None:
        try:
            self._made = self._make()
        except BaseException as error:
            self._error = error
        self._is_over.set()

    def wait(self, timeout_s: float, check_peers: Callable[[], None]) -> Any:
        """Wait for the group and return it.

        Raises:
            TimeoutError: it is not ready in time; the thread continues.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self._is_over.wait(_LOOK_EVERY_S):
            check_peers()
            if time.monotonic() > deadline_s:
                raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._made


class GlooConnections:
    """The Gloo connections of one process. Thread-safe. Creation is collective. See [Note: shared Gloo].

    Args:
        store: through which Gloo connects; only this object uses its keys.
        rank: this rank in the group that connects.
        world_size: number of ranks of that group.
        address: address of this host, the only one on which Gloo listens and from which it connects.
        admitted: the addresses from which ranks connect; None for any. See [Note: Gloo's port].
        timeout_s: seconds until missing connections are an error.
        check_peers: called while ranks connect; raises if one of them is gone.

    Attributes:
        world_size: number of ranks that are connected.
        num_users: number of groups that use the connections.

    Raises:
        RendezvousError: a host is unreachable.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        address: str,
        admitted: Collection[str] | None,
        timeout_s: float,
        check_peers: Callable[[], None] = lambda: None,
    ) -> None:
        what = f"rank {rank} of {world_size} could not connect to all others by Gloo at {address}"
        try:
            port_filter = GlooPortFilter(address, admitted)
            limit = timedelta(seconds=timeout_s)
            connecting = _Connecting(lambda: gloo_group(store, rank, world_size, port_filter.device, limit))
            try:
                self._group: Any = connecting.wait(timeout_s, check_peers)
            finally:
                port_filter.close()
        except LockstepError:
            raise
        except TimeoutError:
            raise RendezvousError(f"{what} within {timeout_s:.1f} s. Is there a firewall between the hosts?") from None
        except RuntimeError as error:
            _explain(check_peers)
            raise RendezvousError(f"{what}: {str(error).splitlines()[0]}") from None
        self.world_size = world_size
        self.num_users = 0
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._are_whole = True
        self._num_made = 0  # groups to which this rank has given a number
        self._rank = rank
        self._kept: list[object] = []
        self._lock = threading.Lock()

    def number(self) -> int:
        """A unique number, from 1 on, for a further group whose first rank this is. Local."""
        with self._lock:
            self._num_made += 1
            return self._num_made * self.world_size + self._rank

    @property
    def can_be_shared(self) -> bool:
        """Whether further groups may use the connections."""
        return self._are_whole and bool(self.num_users) and can_end_waits()

    def send(self, peer: int, memory: torch.Tensor, tag: int) -> Any:
        """Start sending bytes: uint8, contiguous. They must not change until it has finished. Local.

        Returns:
            The object that `GlooTransfer` waits for.
        """
        return self._begin(self._group.send, memory, peer, tag)

    def receive(self, peer: int, memory: torch.Tensor, tag: int) -> Any:
        """Start receiving bytes: uint8, contiguous; in the order of the peer's sends with that tag. Local.

        Returns:
            The object that `GlooTransfer` waits for.
        """
        return self._begin(self._group.recv, memory, peer, tag)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Start summing a flat contiguous tensor over all ranks in place. Collective, in the same order on all ranks.

        Returns:
            The object that `GlooTransfer` waits for.
        """
        options = dist.AllreduceOptions()
        options.timeout = _FOREVER  # See [Note: waits] in `gloo_transport.py`.
        return self._begin(self._group.allreduce, tensor, options)

    def _begin(self, verb: Callable[..., Any], memory: torch.Tensor, *arguments: object) -> Any:
        # A peer's death shows here or in the wait; the wait reports it.
        try:
            return verb([memory], *arguments)
        except RuntimeError as error:
            return _Refused(error)

    def keep(self, under_way: object) -> None:
        """Keep abandoned transfers, and thereby the memory that Gloo may still access. Local."""
        self._kept.append(under_way)

    def break_off(self) -> None:
        """Close the connections for all groups, so that every wait ends. Local."""
        self._are_whole = False
        # See [Note: waits]; Gloo's own abort() does not end waits.
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _BREAK_OFF_TAG).wait(_AT_ONCE)

    def open(self) -> None:
        """Add one user. Local."""
        with self._lock:
            self.num_users += 1

    def close(self) -> None:
        """Remove one user. The last one releases the connections. Local."""
        with self._lock:
            self.num_users -= 1
            if self.num_users:
                return
        if self._kept:
            self.break_off()
        # Dropping the last reference closes the connections; with an old torch, only after waiting for their end.
        elif not joins_gloo_with_gil(torch.__version__):
            self._group = _ClosedGroup()
