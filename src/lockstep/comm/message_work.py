"""Work handles of sends and receives."""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch.futures import Future

from lockstep.comm.tensors import FlatTensor
from lockstep.comm.work import DoneWork, PendingWork
from lockstep.shm.messages import Receive, Send

__all__ = ["DoneMessage", "MessageWork", "source_of"]

_NO_SOURCE = -1


def source_of(operation: Send | Receive) -> int:
    """Group rank that a message came from; -1 for a send, or before it is known."""
    if isinstance(operation, Send) or operation.peer is None:
        return _NO_SOURCE
    return operation.peer


class _Owner(Protocol):
    def drive(self, work: MessageWork, timeout_s: float | None) -> None: ...

    def name_of(self, operation: Send | Receive) -> str: ...


class DoneMessage(DoneWork):
    """A send or receive that had finished before it returned.

    Args:
        tensor: what was sent or received.
        source: group rank it came from; -1 for a send.
    """

    def __init__(self, tensor: torch.Tensor, source: int) -> None:
        super().__init__([tensor])
        self._source = source

    def _source_rank(self) -> int:
        """Group rank of the sender; torch's `recv` from any source asks for it."""
        return self._source


class MessageWork(PendingWork):
    """A send or receive under way.

    Args:
        owner: moves the messages of the group.
        operation: the operation of the mailbox.
        item: the tensor that is sent, or received into.
        timeout_s: seconds from the first wait to the deadline.

    Attributes:
        awaited_since_s: monotonic time at which a thread began to wait for it; None if none has.
    """

    def __init__(self, owner: _Owner, operation: Send | Receive, item: FlatTensor, timeout_s: float) -> None:
        super().__init__(lambda: None, [item.tensor], lambda: owner.name_of(operation))
        self.operation = operation
        self.timeout_s = timeout_s
        self.awaited_since_s: float | None = None
        self._owner = owner
        self._item = item

    def finish(self, error: BaseException | None = None) -> None:
        """Keep the outcome and hand it to the waiting threads. Once, and under no lock: callbacks run in here."""
        if error is None and isinstance(self.operation, Receive):
            self._item.write_back()
        self._error = error
        self._finish()

    def _await(self, timeout_s: float | None) -> bool:
        """Whether it has finished by then. The thread that waits moves the messages of the group."""
        if not self.is_completed():
            self._owner.drive(self, timeout_s)
        return self.is_completed()

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future that finishes with it. The deadline runs from now on."""
        self.start_deadline()
        return super().get_future()

    def start_deadline(self) -> None:
        """Let the deadline run from now on, if it does not run yet."""
        if self.awaited_since_s is None:
            self.awaited_since_s = time.monotonic()

    def _source_rank(self) -> int:
        """Group rank of the sender; torch's `recv` from any source asks for it."""
        return source_of(self.operation)
