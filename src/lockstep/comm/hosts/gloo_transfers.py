"""Gloo's pending transfers (sends, receives and sums), and the threads that wait for them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch

from lockstep.torch_private.gloo_waits import end_wait

__all__ = ["GlooTransfer", "TransferWatcher", "unfinished"]

_FOREVER = timedelta(days=30)
_ENDS_WAITS_EVERY_S = 0.02


class GlooTransfer:
    """A pending send, receive or sum of Gloo.

    Args:
        work: what torch's group returned.
        peers: the rank at the other end; all other ranks, for a sum.
        memory: the contiguous tensor that is transferred.
        under_way: the set of unfinished transfers, which contains this one until it has finished. Abandoned transfers
            must be kept by their owner, because otherwise Gloo stops reading from the peer.

    Attributes:
        peers: the ranks at the other ends.
        is_done: whether it is known to have finished, successfully or not.
        has_failed: whether it ended without transferring its bytes, because the connection is gone.
    """

    __slots__ = ("_memory", "_under_way", "_work", "has_failed", "is_done", "peers")

    def __init__(self, work: Any, peers: tuple[int, ...], memory: torch.Tensor, under_way: set[GlooTransfer]) -> None:
        self._work = work
        self._memory = memory  # read or written by Gloo until the end
        self._under_way = under_way
        under_way.add(self)
        self.peers = peers
        self.is_done = self.has_failed = False

    def wait(self) -> None:
        """Wait until it has finished.

        Raises:
            RuntimeError: the connection is gone.
        """
        if not self.is_done:
            self.has_failed = True  # until proven otherwise: another thread reads this once `is_done` is set
            try:
                self.has_failed = self._work.wait(_FOREVER) is False
            finally:
                self.is_done = True
            if not self.has_failed:
                self._under_way.discard(self)
        if self.has_failed:
            raise RuntimeError("its wait was ended")

    def end_wait(self) -> None:
        """Make the wait in another thread raise. Local; for connections that are gone."""
        end_wait(self._work)


def unfinished(transfers: Iterable[GlooTransfer], patience_s: float) -> list[GlooTransfer]:
    """The transfers of an abandoned group that have not finished after a moment. Nobody else waits for them. Local."""

    def wait(transfer: GlooTransfer) -> None:
        with contextlib.suppress(RuntimeError):
            transfer.wait()

    waits = [(one, threading.Thread(target=wait, args=(one,), daemon=True)) for one in transfers]
    for _, thread in waits:
        thread.start()
    until_s = time.monotonic() + patience_s
    found = []
    for transfer, thread in waits:
        thread.join(max(until_s - time.monotonic(), 0.0))
        if thread.is_alive() or transfer.has_failed:
            found.append(transfer)
            transfer.end_wait()
    return found


class TransferWatcher:
    """A thread that waits for the transfers with one peer in order, and reports the end of each."""

    def __init__(self) -> None:
        self._watched: queue.SimpleQueue[tuple[GlooTransfer, Callable[[], None]] | None] = queue.SimpleQueue()
        self._waits_for: GlooTransfer | None = None
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name="lockstep-gloo-wait", daemon=True)
        self._thread.start()

    def watch(self, transfer: GlooTransfer, on_done: Callable[[], None]) -> None:
        """Wait for a transfer, after those before it, and then call `on_done`. Local."""
        self._watched.put((transfer, on_done))

    def _run(self) -> None:
        while (item := self._watched.get()) is not None and not self._is_given_up:
            transfer, on_done = item
            self._waits_for = transfer
            with contextlib.suppress(RuntimeError):  # The connection is gone; the waits of others report that.
                transfer.wait()
            on_done()

    def stop(self) -> None:
        """End the thread once it has waited for all. Local."""
        self._watched.put(None)

    def has_ended(self, patience_s: float) -> bool:
        """Whether the thread ends within `patience_s` seconds. Local."""
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def give_up(self, patience_s: float) -> None:
        """End the current wait, and the thread. Local."""
        self._is_given_up = True
        until_s = time.monotonic() + patience_s
        while not self.has_ended(_ENDS_WAITS_EVERY_S) and time.monotonic() < until_s:
            if self._waits_for is not None and not self._waits_for.is_done:
                self._waits_for.end_wait()
