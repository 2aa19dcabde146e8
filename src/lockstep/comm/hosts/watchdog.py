"""Monitors the peers while this rank waits for their data by Gloo. See [Note: waits] in `gloo_transport.py`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from lockstep.comm.hosts.gloo_transfers import GlooTransfer, unfinished
from lockstep.shm.sync import FailureKind, PeerFailure
from lockstep.topology import name_ranks

__all__ = ["Watchdog"]

_LOOKS_EVERY_S = 0.02
_LOOKS_AT_LEAST_EVERY_S = 0.2
_RESTS_AFTER_S = 1.0
_REASON_FOLLOWS_WITHIN_S = 1.0
_CLOSE_PATIENCE_S = 2.0
_ENDS_WAITS_AFTER_S = 0.05
_ASKS_FOR_S = 0.05


class Watchdog:
    """Monitors the peers while this rank waits for their data.

    Args:
        look: called with ranks, seconds waited and the timeout; raises PeerFailure if one of the ranks will not come.
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
        """Wait until all of these transfers have finished.

        Raises:
            PeerFailure: a peer died, failed, left, or was too late.
        """
        pending = [transfer for transfer in transfers if transfer.has_failed or not transfer.is_done]
        if not pending:
            return
        since = time.monotonic()
        self._pending = pending
        self._watched = (_peers_of(pending), since, timeout_s)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lockstep-watchdog", daemon=True)
            self._thread.start()
        if not self._is_needed.is_set():
            self._is_needed.set()
        peers = pending[0].peers
        try:
            for transfer in pending:
                peers = transfer.peers
                transfer.wait()
        except RuntimeError as error:
            self._watched = None
            self._explain(peers, since, timeout_s, error)
        finally:
            self._watched = None

    def _explain(self, peers: Sequence[int], since: float, timeout_s: float, error: RuntimeError) -> None:
        """Raise the reason why a connection is gone: as seen by the watchdog, or as it can be seen now."""
        until = time.monotonic() + _REASON_FOLLOWS_WITHIN_S
        while True:
            if self._failure is not None:
                raise self._failure from None
            self._look(peers, time.monotonic() - since, timeout_s)
            if time.monotonic() > until:
                raise RuntimeError(f"the connection to {name_ranks(peers)} of the group broke: {error}") from None
            time.sleep(0.001)

    def _run(self) -> None:
        used_at = time.monotonic()
        while not self._is_closed:
            watched, now = self._watched, time.monotonic()
            if watched is not None:
                used_at = now
                ranks, since, timeout_s = watched
                try:
                    self._look(ranks, now - since, timeout_s)
                except PeerFailure as failure:
                    self._failure = self._of_those_missing(failure)
                    self._abort()
                    self._end_waits()
                    return  # The group is broken.
            elif now - used_at > _RESTS_AFTER_S:
                self._is_needed.clear()
                if self._watched is None and not self._is_closed:
                    self._is_needed.wait()
                used_at = time.monotonic()
                continue
            waited_s = 0.0 if watched is None else now - watched[1]
            time.sleep(min(max(_LOOKS_EVERY_S, waited_s / 10), _LOOKS_AT_LEAST_EVERY_S))

    def _of_those_missing(self, failure: PeerFailure) -> PeerFailure:
        """Remove from a failure of late ranks those whose transfers have finished: they have kept nobody waiting.

        This rank waits for the first transfer that has not finished.
        """
        if any(kind is not FailureKind.LATE for kind in failure.kinds.values()):
            return failure
        waiting = [transfer for transfer in self._pending if not transfer.is_done]
        late = _peers_of([*waiting[:1], *unfinished(waiting[1:], _ASKS_FOR_S)])
        kinds = {peer: kind for peer, kind in failure.kinds.items() if peer in late}
        return PeerFailure(kinds, failure.waited_s) if kinds else failure

    def _end_waits(self) -> None:
        """Wait until this rank no longer waits; the connections are closed."""
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


def _peers_of(transfers: Sequence[GlooTransfer]) -> tuple[int, ...]:
    return tuple({peer for transfer in transfers for peer in transfer.peers})
