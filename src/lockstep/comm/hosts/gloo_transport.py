"""Moves large data between the ranks of a group over several hosts, by Gloo.

Only sends and receives of Gloo are used: they go straight from one memory to another without the GIL. What is added to
what, and in which order, stays Lockstep's business (`wire.py`, `pipeline.py`).

[Note: waits] A thread can wait for a send or receive of Gloo, but not ask whether it is done; and a wait that reaches a
deadline closes the connection for good. So a thread that needs data waits without a deadline, which costs nothing
while all is well, and a second thread, the `Watchdog`, watches the peers meanwhile. If one of them fails, the watchdog
closes the connections, which ends the wait; and where it does not, because the transfer was in the middle of its bytes
([Note: waits that no error ends] in `torch_private/gloo_waits.py`), it ends the wait itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from typing import Any

import torch

from lockstep.comm.hosts.gloo_door import GlooDoor
from lockstep.comm.hosts.gloo_transfers import GlooTransfer, TransferWatcher
from lockstep.comm.torch_version import joins_gloo_with_gil
from lockstep.errors import LockstepError, RendezvousError
from lockstep.torch_private.groups import gloo_group
from lockstep.torch_private.stores import Store

__all__ = ["GlooTransport"]

_AT_ONCE = timedelta(milliseconds=1)
_ABORT_TAG = 1 << 20
_LOOK_EVERY_S = 0.01
_CLOSE_PATIENCE_S = 2.0


class _Refused:
    """A send or receive that could not begin, because the connection is gone; its wait raises that."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, _: timedelta) -> bool:
        raise self._error


class _ClosedGroup:
    """Stands where the group was: nothing can begin any more."""

    def send(self, *_: object) -> None:
        raise RuntimeError("the group is closed")

    recv = send


def _nothing_lost() -> None:
    """Check nothing."""


class _Connecting:
    """The making of a group, in a thread of its own: Gloo asks for a dead rank five times as long as it is told to.

    Args:
        make: makes the group.
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
        """The group.

        Raises:
            TimeoutError: it is not there in time; the thread goes on.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self._is_over.wait(_LOOK_EVERY_S):
            check_peers()
            if time.monotonic() > deadline_s:
                raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._made


class GlooTransport:
    """Gloo connections between the ranks of one group. Collective to make.

    Args:
        store: through which Gloo connects; nobody else uses its keys.
        rank: this rank in the group.
        world_size: number of ranks of the group.
        address: address of this host; Gloo listens and connects there only.
        admitted: the addresses from which ranks connect; None for any. See [Note: Gloo's door].
        timeout_s: seconds until missing connections are an error.
        check_peers: called while ranks connect; raises if one of them is gone.

    Raises:
        RendezvousError: a host cannot be reached.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        address: str,
        admitted: Collection[str] | None,
        timeout_s: float,
        check_peers: Callable[[], None] = _nothing_lost,
    ) -> None:
        what = f"rank {rank} of {world_size} could not connect to all others by Gloo at {address}"
        try:
            door = GlooDoor(address, admitted)
            limit = timedelta(seconds=timeout_s)
            connecting = _Connecting(lambda: gloo_group(store, rank, world_size, door.device, limit))
            try:
                self._group: Any = connecting.wait(timeout_s, check_peers)
            finally:
                door.close()
        except LockstepError:
            raise
        except TimeoutError:
            raise RendezvousError(f"{what} within {timeout_s:.1f} s. Is there a firewall between the hosts?") from None
        except RuntimeError as error:
            raise RendezvousError(f"{what}: {str(error).splitlines()[0]}") from None
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._watchers: dict[int, TransferWatcher] = {}  # by peer
        self._is_closed = False

    def send(self, peer: int, memory: torch.Tensor, tag: int) -> GlooTransfer:
        """Begin to send bytes: uint8, contiguous. They must not change until it has finished. Local."""
        return self._begin(self._group.send, peer, memory, tag)

    def receive(self, peer: int, memory: torch.Tensor, tag: int) -> GlooTransfer:
        """Begin to receive bytes: uint8, contiguous; in the order of the peer's sends with that tag. Local."""
        return self._begin(self._group.recv, peer, memory, tag)

    def _begin(self, verb: Callable[..., Any], peer: int, memory: torch.Tensor, tag: int) -> GlooTransfer:
        # The death of a peer shows here or in a wait; the wait explains it.
        try:
            return GlooTransfer(verb([memory], peer, tag), peer, memory)
        except RuntimeError as error:
            return GlooTransfer(_Refused(error), peer, memory)

    def watch(self, transfer: GlooTransfer, on_done: Callable[[], None]) -> GlooTransfer:
        """Have a thread wait for a transfer and then call `on_done`; meanwhile the caller asks `is_done`. Local.

        A peer that is stopped must not keep others from being heard, so each has a thread of its own.
        """
        if transfer.peer not in self._watchers:
            self._watchers[transfer.peer] = TransferWatcher()
        self._watchers[transfer.peer].watch(transfer, on_done)
        return transfer

    def abort(self, peers: Iterable[int] | None = None) -> None:
        """Close the connections to these peers, None for all, so that every wait for them ends. Local."""
        # See [Note: waits]; Gloo's own abort() lets waits go on.
        for peer in self._peers if peers is None else peers:
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(_AT_ONCE)

    def close(self, in_good_order: bool) -> None:
        """Release the connections. Local."""
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
                watcher.end_wait()
            for watcher in self._watchers.values():
                watcher.has_ended(_CLOSE_PATIENCE_S)
        # The last reference to the group closes its connections; with an old torch that has to wait for the end.
        if in_good_order and not joins_gloo_with_gil(torch.__version__):
            self._group = _ClosedGroup()
