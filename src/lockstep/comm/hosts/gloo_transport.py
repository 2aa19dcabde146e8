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
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch

from lockstep.comm.hosts.gloo_door import GlooDoor
from lockstep.comm.torch_version import joins_gloo_with_gil
from lockstep.errors import LockstepError, RendezvousError
from lockstep.shm.sync import PeerFailure
from lockstep.torch_private.gloo_waits import end_wait
from lockstep.torch_private.groups import gloo_group
from lockstep.torch_private.stores import Store

__all__ = ["GlooTransfer", "GlooTransport", "Watchdog"]

_FOREVER = timedelta(days=30)
_AT_ONCE = timedelta(milliseconds=1)
_ABORT_TAG = 1 << 20
_WATCHDOG_LOOKS_EVERY_S = 0.02
_WATCHDOG_LOOKS_AT_LEAST_EVERY_S = 0.2
_WATCHDOG_RESTS_AFTER_S = 1.0
_REASON_FOLLOWS_WITHIN_S = 1.0
_CLOSE_PATIENCE_S = 2.0
_ENDS_WAITS_AFTER_S = 0.05


class GlooTransfer:
    """A send or receive of Gloo under way.

    Attributes:
        peer: the rank at the other end.
        is_done: whether it has been seen to finish, well or not.
    """

    __slots__ = ("_memory", "_work", "is_done", "peer")

    def __init__(self, work: Any, peer: int, memory: torch.Tensor) -> None:
        self._work = work
        self._memory = memory  # Gloo reads or writes it until the end
        self.peer = peer
        self.is_done = False

    def wait(self) -> None:
        """Return when it has finished.

        Raises:
            RuntimeError: the connection is gone.
        """
        if not self.is_done:
            try:
                has_finished = self._work.wait(_FOREVER)
            finally:
                self.is_done = True
            if has_finished is False:
                raise RuntimeError("its wait was ended")

    def end_wait(self) -> None:
        """End the wait of another thread, which raises. Local; for connections that are gone."""
        end_wait(self._work)


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


class GlooTransport:
    """Gloo connections between the ranks of one group. Collective to make.

    Args:
        store: through which Gloo connects; nobody else uses its keys.
        rank: this rank in the group.
        world_size: number of ranks of the group.
        address: address of this host; Gloo listens and connects there only.
        admitted: the addresses from which ranks connect; None for any. See [Note: Gloo's door].
        timeout_s: seconds until missing connections are an error.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        address: str,
        admitted: Collection[str] | None,
        timeout_s: float,
    ) -> None:
        try:
            door = GlooDoor(address, admitted)
            self._group: Any = gloo_group(store, rank, world_size, door.device, timedelta(seconds=timeout_s))
            door.close()
        except LockstepError:
            raise
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {rank} of {world_size} could not connect to all others by Gloo at {address}: "
                f"{str(error).splitlines()[0]}"
            ) from None
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._watched: queue.SimpleQueue[tuple[GlooTransfer, Callable[[], None]] | None] = queue.SimpleQueue()
        self._watcher: threading.Thread | None = None
        self._waits_for: GlooTransfer | None = None  # that thread
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
        """Have a thread wait for a transfer and then call `on_done`; meanwhile the caller asks `is_done`. Local."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._wait_for_watched, name="lockstep-gloo-wait", daemon=True)
            self._watcher.start()
        self._watched.put((transfer, on_done))
        return transfer

    def _wait_for_watched(self) -> None:
        while (item := self._watched.get()) is not None:
            transfer, on_done = item
            self._waits_for = transfer
            with contextlib.suppress(RuntimeError):  # The connection is gone; the waits of others explain that.
                transfer.wait()
            on_done()

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
        if self._watcher is not None:
            self._watched.put(None)
            self._watcher.join(_CLOSE_PATIENCE_S)
            if self._watcher.is_alive():
                self.abort()
                if self._waits_for is not None:
                    self._waits_for.end_wait()
                self._watcher.join(_CLOSE_PATIENCE_S)
        # The last reference to the group closes its connections; with an old torch that has to wait for the end.
        if in_good_order and not joins_gloo_with_gil(torch.__version__):
            self._group = _ClosedGroup()


class Watchdog:
    """Watches the peers while this rank waits for data from them.

    Args:
        look: called with ranks, seconds waited and the limit; raises PeerFailure if one of the ranks will not come.
        abort: closes the connections, which ends the wait.
    """

    def __init__(self, look: Callable[[Sequence[int], float, float], None], abort: Callable[[], None]) -> None:
        self._look = look
        self._abort = abort
        self._watched: tuple[tuple[int, ...], float, float] | None = None  # ranks, since when, limit
        self._failure: PeerFailure | None = None
        self._pending: Sequence[GlooTransfer] = ()
        self._is_needed = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def wait(self, transfers: Sequence[GlooTransfer], timeout_s: float) -> None:
        """Return when all of these transfers have finished.

        Raises:
            PeerFailure: a peer died, failed or left, or was not done in time.
        """
        pending = [transfer for transfer in transfers if not transfer.is_done]
        if not pending:
            return
        since = time.monotonic()
        self._pending = pending
        self._watched = (tuple({transfer.peer for transfer in pending}), since, timeout_s)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lockstep-watchdog", daemon=True)
            self._thread.start()
        if not self._is_needed.is_set():
            self._is_needed.set()
        peer = pending[0].peer
        try:
            for transfer in pending:
                peer = transfer.peer
                transfer.wait()
        except RuntimeError as error:
            self._watched = None
            self._explain(peer, since, timeout_s, error)
        finally:
            self._watched = None

    def _explain(self, peer: int, since: float, timeout_s: float, error: RuntimeError) -> None:
        """Raise why a connection is gone: what the watchdog has seen, or what can be seen now."""
        until = time.monotonic() + _REASON_FOLLOWS_WITHIN_S
        while True:
            if self._failure is not None:
                raise self._failure from None
            self._look([peer], time.monotonic() - since, timeout_s)
            if time.monotonic() > until:
                raise RuntimeError(f"the connection to rank {peer} of the group broke: {error}") from None
            time.sleep(0.001)

    def _run(self) -> None:
        used_at = time.monotonic()
        while not self._is_closed:
            watched, now = self._watched, time.monotonic()
            if watched is not None:
                used_at = now
                ranks, since, limit_s = watched
                try:
                    self._look(ranks, now - since, limit_s)
                except PeerFailure as failure:
                    self._failure = failure
                    self._abort()
                    self._end_waits()
                    return  # The group is broken.
            elif now - used_at > _WATCHDOG_RESTS_AFTER_S:
                self._is_needed.clear()
                if self._watched is None and not self._is_closed:
                    self._is_needed.wait()
                used_at = time.monotonic()
                continue
            waited_s = 0.0 if watched is None else now - watched[1]
            time.sleep(min(max(_WATCHDOG_LOOKS_EVERY_S, waited_s / 10), _WATCHDOG_LOOKS_AT_LEAST_EVERY_S))

    def _end_waits(self) -> None:
        """Return when this rank waits no more; the connections are closed."""
        while self._watched is not None and not self._is_closed:
            time.sleep(_ENDS_WAITS_AFTER_S)
            for transfer in self._pending:
                if not transfer.is_done:
                    transfer.end_wait()

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._is_needed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_PATIENCE_S)
