"""The base class of all mailboxes, whatever moves the messages; `lockstep.comm.p2p` uses only this interface."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping

import torch

from lockstep.errors import SharedMemoryError
from lockstep.shm.cores import nap
from lockstep.shm.messages import Incoming, Label, Matcher, Receive, Send

__all__ = ["BaseMailbox"]


class BaseMailbox(abc.ABC):
    """The messages of one rank: which operations are pending, and which have finished. Subclasses move the bytes.

    Args:
        matcher: matches messages and receives; passed if this is not the only mailbox of its rank.
    """

    def __init__(self, matcher: Matcher | None = None) -> None:
        self._matcher = Matcher() if matcher is None else matcher
        self._finished: list[Send | Receive] = []

    @property
    @abc.abstractmethod
    def num_records(self) -> int:
        """Number of records read, written and moved so far; changes whenever messages move."""

    @property
    def unmapped(self) -> Mapping[int, tuple[float, SharedMemoryError]]:
        """Ranks whose memory cannot be mapped, so that their messages stay unread: since when (monotonic), and why.

        This may be because a rank is gone; for the others, the error is shown.
        """
        return {}

    @abc.abstractmethod
    def send(self, peer: int, tag: int, label: Label, flat: torch.Tensor) -> Send:
        """Start sending. Local.

        Args:
            peer: rank of the receiver; may be this rank.
            tag: the tag that a receive must have to match.
            label: describes the tensor and the line of the call.
            flat: the bytes: uint8 of shape (n,). They must not change until the send is done.
        """

    def receive(self, source: int, tag: int, label: Label, flat: torch.Tensor) -> Receive:
        """Start receiving. Local.

        Args:
            source: rank of the sender, or `ANY_SOURCE`.
            tag: the tag that the message must have to match.
            label: describes the tensor and the line of the call.
            flat: memory for the bytes: uint8 of shape (n,).
        """
        receive = Receive(tag, label, flat, source=source)
        self.expect(receive)
        arrival = self._matcher.arrival_for(receive)
        if arrival is not None:
            self.deliver(receive, arrival)
            self.ring()
        return receive

    @abc.abstractmethod
    def progress(self) -> None:
        """Do what can be done now. Local; does not wait."""

    @abc.abstractmethod
    def deliver(self, receive: Receive, arrival: Incoming) -> None:
        """Copy what has arrived of a matching message, and arrange for the rest."""

    def expect(self, receive: Receive) -> None:  # noqa: B027 - not every kind has to look out
        """Start watching for messages for that receive. Local."""

    def forget(self, operation: Send | Receive) -> None:  # noqa: B027
        """Stop watching for an operation, if this mailbox does so. Local."""

    def ring(self) -> None:  # noqa: B027 - not every kind can wake its peers
        """Wake the peers that sleep until something that this rank has done since the last call. Local."""

    def arm(self) -> int:
        """Request to be woken when a peer has done something that lets `progress` continue. Local.

        Returns:
            The value for `sleep`. Call `progress` once more before sleeping; see [Note: bells] in doorbell.py.
        """
        return 0

    def is_armed(self, seen: int) -> bool:
        """Whether the doorbell has not rung since `arm` returned `seen`, so that `sleep` needs no new call. Local."""
        return False

    def sleep(self, seen: int, timeout_s: float, poll_s: float) -> None:
        """Sleep until there may be something for `progress` to do. Local; may return early without reason.

        Args:
            seen: the return value of `arm`.
            timeout_s: the longest sleep, in seconds.
            poll_s: the longest sleep if this system cannot wake a sleeper.
        """
        nap(min(timeout_s, poll_s))

    def wake_here(self) -> None:  # noqa: B027
        """End the sleep of this rank's other threads. Local."""

    def take_finished(self) -> list[Send | Receive]:
        """The operations that have finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def abandon(self, operation: Send | Receive) -> None:
        """Abandon an operation. The peer's side may never end.

        The operation does not touch shared memory again. If another process was allowed to send into its tensor, bytes
        may still arrive, so the tensor is kept alive.
        """
        if not operation.done:
            operation.done = True
            self.forget(operation)
            if isinstance(operation, Receive):
                self._matcher.withdraw(operation)

    def kept_from(self, peer: int) -> Iterator[Incoming]:
        """The messages from a peer that wait here for a receive, in order of arrival."""
        return self._matcher.kept_from(peer)

    @abc.abstractmethod
    def close(self) -> None:
        """Release the memory through which messages travel. Local."""

    def _match(self, arrival: Incoming) -> None:
        """Deliver a message to the receive that waits for it, or keep it."""
        receive = self._matcher.receive_for(arrival)
        if receive is not None:
            self.deliver(receive, arrival)
        else:
            self._keep(arrival)

    def _keep(self, arrival: Incoming) -> None:
        self._matcher.keep(arrival)

    def _finish(self, operation: Send | Receive, conflict: Label | None = None) -> None:
        if not operation.done:
            operation.done = True
            operation.conflict = conflict
            self.forget(operation)
            self._finished.append(operation)
