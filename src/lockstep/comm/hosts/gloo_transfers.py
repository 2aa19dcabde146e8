"""Sends and receives of Gloo that are under way, and the threads that wait for them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from lockstep.torch_private.gloo_waits import end_wait

__all__ = ["GlooTransfer", "TransferWatcher"]

_FOREVER = timedelta(days=30)
_AT_ONCE = timedelta(milliseconds=1)


class GlooTransfer:
    """A send or receive of Gloo under way.

    Attributes:
        peer: the rank at the other end.
        is_done: whether it has been seen to finish, well or not.
        has_failed: whether it has finished without its bytes, because the connection is gone.
    """

    __slots__ = ("_memory", "_work", "has_failed", "is_done", "peer")

    def __init__(self, work: Any, peer: int, memory: torch.Tensor) -> None:
        self._work = work
        self._memory = memory  # Gloo reads or writes it until the end
        self.peer = peer
        self.is_done = self.has_failed = False

    def wait(self) -> None:
        """Return when it has finished.

        Raises:
            RuntimeError: the connection is gone.
        """
        if not self.is_done:
            self.has_failed = True  # Until it is known: another thread looks once `is_done` says so.
            try:
                self.has_failed = self._work.wait(_FOREVER) is False
            finally:
                self.is_done = True
        if self.has_failed:
            raise RuntimeError("its wait was ended")

    def end_wait(self) -> None:
        """End the wait of another thread, which raises. Local; for connections that are gone."""
        end_wait(self._work)

    def is_there(self) -> bool:
        """Whether it has finished; if not, the connection to its peer is closed. For a group that is given up anyway.

        No other thread may wait for it meanwhile.
        """
        try:
            return self.is_done or self._work.wait(_AT_ONCE) is not False
        except RuntimeError:
            return False


class TransferWatcher:
    """A thread that waits for transfers with one peer, in their order, and tells of the end of each."""

    def __init__(self) -> None:
        self._watched: queue.SimpleQueue[tuple[GlooTransfer, Callable[[], None]] | None] = queue.SimpleQueue()
        self._waits_for: GlooTransfer | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-gloo-wait", daemon=True)
        self._thread.start()

    def watch(self, transfer: GlooTransfer, on_done: Callable[[], None]) -> None:
        """Wait for a transfer after those before, and then call `on_done`. Local."""
        self._watched.put((transfer, on_done))

    def _run(self) -> None:
        while (item := self._watched.get()) is not None:
            transfer, on_done = item
            self._waits_for = transfer
            with contextlib.suppress(RuntimeError):  # The connection is gone; the waits of others explain that.
                transfer.wait()
            on_done()

    def stop(self) -> None:
        """End the thread once it has waited for all. Local."""
        self._watched.put(None)

    def has_ended(self, patience_s: float) -> bool:
        """Whether the thread has ended, after a moment's patience. Local."""
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def end_wait(self) -> None:
        """End the wait under way, for a connection that is gone. Local."""
        if self._waits_for is not None:
            self._waits_for.end_wait()
