"""Point to point in a group on several hosts: through shared memory within a host, by messages between hosts.

One matcher knows all messages and all receives, so that a receive from any source takes what came first,
wherever it came from. How a message moves is up to the mailbox for its peer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from lockstep.comm.hosts.team import HostsTeam
from lockstep.comm.mpi.mailbox import MpiMailbox
from lockstep.comm.mpi.team import MpiTeam
from lockstep.shm.mailbox import Mailbox
from lockstep.shm.messages import ANY_SOURCE, Arrival, Label, Matcher, Receive, Send

__all__ = ["HostsMailbox"]


class HostsMailbox:
    """The messages of one rank. Not thread-safe, save that its team may be in use by another thread.

    Args:
        team: the ranks of the group.
    """

    def __init__(self, team: HostsTeam) -> None:
        self._matcher = Matcher()
        self._places = team.places
        self._near = Mailbox(team.local.mail_area, team.rank, team.world_size, self._places, self._matcher)
        # A HostsTeam has all that this mailbox uses of a team over MPI.
        self._far = MpiMailbox(cast(MpiTeam, team), self._matcher)

    @property
    def num_records(self) -> int:
        """Heard, said and moved so far; who waits can tell by it that something goes on."""
        return self._near.num_records + self._far.num_records

    def send(self, peer: int, tag: int, label: Label, flat: torch.Tensor) -> Send:
        """Begin to send. Local.

        Args:
            peer: where to; may be this rank.
            tag: what a receive must have to match.
            label: of the tensor.
            flat: its bytes: uint8 of shape (n,). They must not change until the send is done.
        """
        return (self._near if peer in self._places else self._far).send(peer, tag, label, flat)

    def receive(self, source: int, tag: int, label: Label, flat: torch.Tensor) -> Receive:
        """Begin to receive. Local.

        Args:
            source: where from, or `ANY_SOURCE`.
            tag: what the message must have to match.
            label: of the tensor.
            flat: where its bytes go: uint8 of shape (n,).
        """
        if source != ANY_SOURCE:
            return (self._near if source in self._places else self._far).receive(source, tag, label, flat)
        receive = Receive(tag, label, flat, source=source)
        self._near.expect(receive)
        arrival = self._matcher.arrival_for(receive)
        if arrival is not None:
            (self._near if arrival.peer in self._places else self._far).deliver(receive, arrival)
        return receive

    def progress(self) -> None:
        """Do what can be done now. Local; waits for nothing."""
        self._near.progress()
        self._far.progress()

    def take_finished(self) -> list[Send | Receive]:
        """The operations that have become done since the last call."""
        far = self._far.take_finished()
        for operation in far:
            self._near.forget(operation)
        return self._near.take_finished() + far

    def abandon(self, operation: Send | Receive) -> None:
        """Stop caring for an operation. What comes from another host may still come into its memory."""
        self._near.forget(operation)
        self._far.abandon(operation)

    def kept_from(self, peer: int) -> Iterator[Arrival]:
        """The messages of a peer that wait here for a receive, in order of arrival."""
        return self._matcher.kept_from(peer)

    def close(self) -> None:
        """Let go of shared memory, and leave what is under way to Gloo. Local."""
        self._near.close()
        self._far.close()
