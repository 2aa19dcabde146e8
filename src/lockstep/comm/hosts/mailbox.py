"""Point to point in a group on several hosts: shared memory within a host, messages between hosts.

A single matcher handles all messages and receives, so a receive from any source takes the first message from any host.
The mailbox responsible for the peer transfers the message.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lockstep.comm.hosts.team import HostsTeam
from lockstep.comm.messages.message_mailbox import MessageMailbox
from lockstep.errors import SharedMemoryError
from lockstep.shm.base_mailbox import BaseMailbox
from lockstep.shm.doorbell import Doorbell
from lockstep.shm.mail_area import MailArea
from lockstep.shm.mailbox import Mailbox
from lockstep.shm.messages import ANY_SOURCE, Incoming, Label, Receive, Send

__all__ = ["HostsMailbox"]


class _LinkBell(Doorbell):
    """Wakes ranks of this host through their connections: they sleep there, because other hosts wake them that way."""

    def __init__(self, area: MailArea, team: HostsTeam) -> None:
        super().__init__(area, team.local_rank_of[team.rank])
        self._team = team
        self._ranks = {local_rank: rank for rank, local_rank in team.local_rank_of.items()}

    def sleep(self, seen: int, timeout_s: float, poll_s: float) -> None:
        """Sleep until a message arrives, even one whose only purpose is to wake."""
        self._team.sleep(timeout_s)

    def want_room(self) -> None:
        """Do nothing: a rank that sleeps for lack of records checks by itself several times a second."""

    def ring_here(self) -> None:
        """Wake the sleeping threads of this rank."""
        self._team.wake_here()

    def _wake(self, local_rank: int) -> None:
        self._team.wake(self._ranks[local_rank])


class HostsMailbox(BaseMailbox):
    """The messages of one rank. Not thread-safe, except that another thread may use its team.

    Args:
        team: the ranks of the group.
    """

    def __init__(self, team: HostsTeam) -> None:
        super().__init__()
        self._local_ranks = team.local_rank_of
        area = team.local.mail_area
        bell = _LinkBell(area, team)
        self._near = Mailbox(area, team.rank, team.world_size, self._local_ranks, self._matcher, bell)
        self._far = MessageMailbox(team, self._matcher)

    @property
    def num_records(self) -> int:
        return self._near.num_records + self._far.num_records

    @property
    def unmapped(self) -> Mapping[int, tuple[float, SharedMemoryError]]:
        return self._near.unmapped

    def send(self, peer: int, tag: int, label: Label, flat: torch.Tensor) -> Send:
        return self._for(peer).send(peer, tag, label, flat)

    def progress(self) -> None:
        self._near.progress()
        self._far.progress()

    def deliver(self, receive: Receive, arrival: Incoming) -> None:
        self._for(arrival.peer).deliver(receive, arrival)

    def expect(self, receive: Receive) -> None:
        if receive.source == ANY_SOURCE or receive.source in self._local_ranks:
            self._near.expect(receive)

    def forget(self, operation: Send | Receive) -> None:
        self._near.forget(operation)

    # Messages from other hosts wake this rank without a doorbell.

    def arm(self) -> int:
        return self._near.arm()

    def is_armed(self, seen: int) -> bool:
        return self._near.is_armed(seen)

    def ring(self) -> None:
        self._near.ring()

    def sleep(self, seen: int, timeout_s: float, poll_s: float) -> None:
        self._near.sleep(seen, timeout_s, poll_s)

    def wake_here(self) -> None:
        self._near.wake_here()

    def take_finished(self) -> list[Send | Receive]:
        far = self._far.take_finished()
        for operation in far:
            self._near.forget(operation)
        return self._near.take_finished() + far

    def close(self) -> None:
        """Release shared memory, and leave pending transfers to Gloo. Local."""
        self._near.close()
        self._far.close()

    def _for(self, peer: int) -> BaseMailbox:
        return self._near if peer in self._local_ranks else self._far
