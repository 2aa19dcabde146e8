"""The base of all mailboxes, however they move messages; `lockstep.comm.p2p` uses nothing else of them."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping

import torch

from lockstep.errors import SharedMemoryError
from lockstep.shm.cores import nap
from lockstep.shm.messages import Incoming, Label, Matcher, Receive, Send

__all__ = ["BaseMailbox"]


class BaseMailbox(abc.ABC):
    """The messages of one rank: which operations there are, and which are over. Subclasses move the bytes.

    Args:
        matcher: matches messages and receives, where this is not the only mailbox of its rank.
    """

    def __init__(self, matcher: Matcher | None = None) -> None:
        self._matcher = Matcher() if matcher is None else matcher
        self._finished: list[Send | Receive] = []

    @property
    @abc.abstractmethod
    def num_records(self) -> int:
        """Records read, written and moved so far; it changes while messages move."""

    @property
    def unmapped(self) -> Mapping[int, tuple[float, SharedMemoryError]]:
        """Ranks whose memory cannot be mapped, so that their messages stay unread: monotonic time since when, and why.

        A rank that is gone is one; the error says so only of the others.
        """
        return {}

    @abc.abstractmethod
    def send(self, peer: int, tag: int, label: Label, flat: torch.Tensor) -> Send:
        """Begin to send. Local.

        Args:
            peer: the rank that receives; may be this rank.
            tag: the tag that a receive must have to match.
            label: describes the tensor and the line of the call.
            flat: its bytes: uint8 of shape (n,). They must not change until the send is done.
        """

    def receive(self, source: int, tag: int, label: Label, flat: torch.Tensor) -> Receive:
        """Begin to receive. Local.

        Args:
            source: the rank that sends, or `ANY_SOURCE`.
            tag: the tag that the message must have to match.
            label: describes the tensor and the line of the call.
            flat: where its bytes go: uint8 of shape (n,).
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
        """Do what can be done now. Local; waits for nothing."""

    @abc.abstractmethod
    def deliver(self, receive: Receive, arrival: Incoming) -> None:
        """Copy what has come of a message that matches, and see to the rest."""

    def expect(self, receive: Receive) -> None:  # noqa: B027 - not every kind has to look out
        """From now on look out for messages for that receive. Local."""

    def forget(self, operation: Send | Receive) -> None:  # noqa: B027
        """Stop looking out for an operation, if this mailbox does. Local."""

    def ring(self) -> None:  # noqa: B027 - not every kind can wake its peers
        """Wake the peers that sleep until something that this rank has done since the last call. Local."""

    def arm(self) -> int:
        """Ask to be woken when a peer has done something that `progress` can continue with. Local.

        Returns:
            The value that `sleep` takes. Call `progress` once more before it; see [Note: bells] in doorbell.py.
        """
        return 0

    def is_armed(self, seen: int) -> bool:
        """Whether nobody has rung since `arm` returned `seen`, so that `sleep` needs no other call of it. Local."""
        return False

    def sleep(self, seen: int, timeout_s: float, poll_s: float) -> None:
        """Sleep until there may be something for `progress` to do. Local; may return early for no reason.

        Args:
            seen: what `arm` returned.
            timeout_s: the longest sleep, in seconds.
            poll_s: the longest sleep where this system cannot wake a sleeper.
        """
        nap(min(timeout_s, poll_s))

    def wake_here(self) -> None:  # noqa: B027
        """End the sleep of this rank's other threads. Local."""

    def take_finished(self) -> list[Send | Receive]:
        """The operations that have become done since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def abandon(self, operation: Send | Receive) -> None:
        """Stop caring for an operation. The peer's side may never end.

        Shared memory is not touched for it again. If another process was allowed to send into its tensor, bytes may
        still come, so the tensor is kept alive.
        """
        if not operation.done:
            operation.done = True
            self.forget(operation)
            if isinstance(operation, Receive):
                self._matcher.withdraw(operation)

    def kept_from(self, peer: int) -> Iterator[Incoming]:
        """The messages of a peer that wait here for a receive, in order of arrival."""
        return self._matcher.kept_from(peer)

    @abc.abstractmethod
    def close(self) -> None:
        """Release the memory that messages travel through. Local."""

    def _match(self, arrival: Incoming) -> None:
        """Hand a message to the receive that waits for it, or keep it."""
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
