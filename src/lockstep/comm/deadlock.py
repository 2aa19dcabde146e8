"""The deadlock detector: ranks that wait for each other in different calls get an error within a second.

Fingerprints reveal ranks that call different operations in one group. But if one rank calls group A and then B, and
another B and then A, each waits in a different group, and no call ever meets a wrong one. What shows is a cycle: rank 0
waits in A for rank 1, which waits in B for rank 0. The same holds for messages: two ranks that both receive first, or a
rank that receives from one that is in a collective; and for a group that some ranks create while others wait for them.

A rank that has waited for a moment publishes its wait in its control block of the default group, which all ranks map:
the collective that it waits in, and the ranks that it waits for. While it waits, it follows these ranks, and those that
they wait for, and checks whether this leads back to itself.

[Note: no false alarm] A false error would be worse than a late one, so a rank counts as waiting only if it cannot reach
any other collective meanwhile. Its main thread is the one that waits; no other thread has ever called a collective, a
send or a receive, or is in the user's code, or may get there, where it could make its first call (`user_threads.py`;
library threads, such as those of a progress bar or a DataLoader, do not count); no other group has queued asynchronous
calls; no other send or receive is under way; and the wait is not a short attempt, such as a message with its own
timeout. Messages sent from signal handlers are not considered. A cycle counts only if it is seen twice, `_CONFIRM_S`
apart, with every rank in the very same wait, and if every rank has confirmed its wait in between, which means that it
has checked again whether the awaited ranks have arrived. Then none of them can have arrived in between: the first to
arrive would have had to stop waiting before. A pair in which one rank sends what the other receives, in the same group
and with the same tag, is not a cycle: a large message may be on its way.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep.comm.contract import PublishedWaits
from lockstep.comm.user_threads import MAIN_THREAD, threads_of_user
from lockstep.comm.work import Runner
from lockstep.shm.messages import Receive, Send
from lockstep.shm.sync import FailureKind, PeerFailure

__all__ = [
    "WAIT_FOR_EACH_OTHER",
    "Deadlock",
    "DeadlockDetector",
    "Messages",
    "forget_other_callers",
    "note_messages",
    "note_other_caller",
]

# Time from the beginning of a wait until the rank publishes it; ordinary waits are shorter.
_PUBLISH_AFTER_S = 0.05
_SEARCH_EVERY_S = 0.02
_LOOK_AGAIN_S = 0.5  # another rank's suspicion has to wait for this one's next check
# A rank with a shorter timeout is only trying, and will reach the next collective.
_SHORTEST_TIMEOUT_S = 2.0
_CONFIRM_S = 0.2
_CONFIRM_LOOKS_EVERY_S = 0.05
# After the error, other ranks may for this long still count on this rank's having waited.
_LAST_WORD_S = 2.0
_MAX_AWAITED = 16

WAIT_FOR_EACH_OTHER = "the ranks wait for each other"
_ORDER_OF_GROUPS = "Ranks that share several groups must call them in the same order."
_ORDER_OF_MESSAGES = (
    "Send before you wait for the receiver: start messages with isend and irecv, or batch_isend_irecv, and wait later."
)

_has_other_callers = False


def note_other_caller() -> None:
    """Note that a thread other than the main thread communicates. Local; see [Note: no false alarm]."""
    global _has_other_callers
    _has_other_callers = True


def forget_other_callers() -> None:
    """Forget such threads. Local; for a process that is given another job, without them."""
    global _has_other_callers
    _has_other_callers = False


class Messages(Protocol):
    """The sends and receives of one group on this rank."""

    def has_unfinished(self, besides: object = None) -> bool:
        """Whether any is under way, other than `besides`."""


_messages: weakref.WeakSet[Messages] = weakref.WeakSet()


def note_messages(messages: Messages) -> None:
    """Include these messages when checking whether this rank has anything else under way. Local."""
    _messages.add(messages)


@dataclass(frozen=True)
class _Wait:
    """The wait that one rank has published."""

    serial: int
    confirmed_ns: int
    awaited: tuple[int, ...]
    tag: str  # of a message; "" in a collective
    group: str
    where: str


class Deadlock(PeerFailure):  # never leaves the package, like the other PeerFailures
    """A wait for ranks that are waiting for this one, in other calls.

    Attributes:
        text: which ranks wait in which call.
        culprits: the global ranks outside the majority; empty without a majority.
    """

    def __init__(self, missing: Sequence[int], waited_s: float, text: str, culprits: tuple[int, ...]) -> None:
        super().__init__(dict.fromkeys(missing, FailureKind.DEADLOCKED), waited_s)
        self.text = text
        self.culprits = culprits


class DeadlockDetector:
    """Checks the waits of one group on one rank for deadlocks; the waiter calls it each time it checks on a wait.

    Args:
        waits: where the ranks of the default group publish their waits; indexed by global rank.
        global_ranks: global rank of each rank of this group.
        rank: this rank in this group.
        group_name: the group's name in errors.
        runner: runs the asynchronous calls of this group.
        where: returns which collective, send or receive this rank is in, and from which line.
    """

    def __init__(
        self,
        waits: PublishedWaits,
        global_ranks: Sequence[int],
        rank: int,
        group_name: str,
        runner: Runner,
        where: Callable[[], str],
    ) -> None:
        self._waits = waits
        self._global_ranks = tuple(global_ranks)
        self._rank = self._global_ranks[rank]
        self._group_name = group_name
        self._where = where
        self._runner = runner
        self._published = ""
        self._search_at_s = 0.0
        self._suspects: dict[int, int] = {}  # rank -> serial of its wait
        self._suspected_at_ns = 0
        self._looked_at_ns = 0

    def look(
        self, missing: Sequence[int], waited_s: float, timeout_s: float, message: Send | Receive | None = None
    ) -> float:
        """Check a wait of this rank for ranks of the group that have not arrived.

        Args:
            missing: ranks of the group that have not arrived.
            waited_s: seconds since the wait began.
            timeout_s: total seconds until the wait times out.
            message: the awaited send or receive; None in a collective.

        Returns:
            Seconds after which to call this again: soon, if there is a cycle to be confirmed.

        Raises:
            Deadlock: the missing ranks are waiting for this one.
        """
        if timeout_s < _SHORTEST_TIMEOUT_S:
            return math.inf
        if waited_s < _PUBLISH_AFTER_S:
            return _PUBLISH_AFTER_S - waited_s
        if not self._is_blocked(message):
            self.end()
            return _LOOK_AGAIN_S
        awaited = sorted(self._global_ranks[rank] for rank in missing)[:_MAX_AWAITED]
        tag = "" if message is None else message.tag
        text = f"{','.join(map(str, awaited))}|{tag}|{self._group_name}|{self._where()}"
        if text != self._published:
            self._waits.publish_wait(text)
            self._published = text
            self._suspects = {}
        now_s = time.monotonic()
        # The caller has checked for the awaited ranks since the last call, but may have been suspended after that.
        self._waits.confirm_wait(self._looked_at_ns)
        self._looked_at_ns = time.monotonic_ns()
        if now_s >= self._search_at_s:
            self._search_at_s = now_s + _SEARCH_EVERY_S
            if self._is_certain():
                self._waits.confirm_wait(time.monotonic_ns() + int(_LAST_WORD_S * 1e9))
                self._published = ""  # so that `end` does not withdraw it
                raise Deadlock(missing, waited_s, *self._explain())
        return _CONFIRM_LOOKS_EVERY_S if self._suspects else _LOOK_AGAIN_S

    def is_waiting_here(self, rank: int) -> bool:
        """Whether that global rank has published a wait in this group."""
        wait = self._wait_of(rank)
        return wait is not None and wait.group == self._group_name

    def end(self) -> None:
        """Withdraw the wait, which has ended."""
        if self._published:
            self._published = ""
            self._waits.withdraw_wait()
        self._suspects = {}

    def _is_blocked(self, message: object) -> bool:
        """Whether this rank can do nothing for others until this wait ends."""
        if _has_other_callers or self._runner.has_unfinished_elsewhere():
            return False
        if any(each.has_unfinished(besides=message) for each in list(_messages)):
            return False
        if message is not None and self._runner.unfinished:
            return False
        if threading.get_ident() != MAIN_THREAD and not self._runner.is_awaited_by_main:
            return False
        return not threads_of_user()

    def _wait_of(self, rank: int) -> _Wait | None:
        published = self._waits.wait_of(rank)
        if published is None:
            return None
        serial, confirmed_ns, text = published
        awaited, tag, group, where = text.split("|", 3)
        return _Wait(serial, confirmed_ns, tuple(int(peer) for peer in awaited.split(",") if peer), tag, group, where)

    def _is_certain(self) -> bool:
        """Whether a cycle has lasted long enough. See [Note: no false alarm]."""
        if self._suspects:
            waits = {rank: self._wait_of(rank) for rank in self._suspects}
            if all(wait is not None and wait.serial == self._suspects[rank] for rank, wait in waits.items()):
                enough_ns = self._suspected_at_ns + int(_CONFIRM_S * 1e9)
                have_looked = all(
                    wait is not None and wait.confirmed_ns > self._suspected_at_ns for wait in waits.values()
                )
                return have_looked and time.monotonic_ns() >= enough_ns
        self._suspects = self._find_cycle()
        self._suspected_at_ns = time.monotonic_ns()
        return False

    def _find_cycle(self) -> dict[int, int]:
        """The ranks of a cycle through this rank, as rank -> serial of its wait; empty if there is none."""
        came_from: dict[int, int] = {}
        serials: dict[int, int] = {}
        frontier = [self._rank]
        while frontier:
            rank = frontier.pop()
            wait = self._wait_of(rank)
            if wait is None:
                continue
            serials[rank] = wait.serial
            if self._rank in wait.awaited:
                cycle = [rank]
                while cycle[-1] != self._rank:
                    cycle.append(came_from[cycle[-1]])
                return {} if self._may_be_exchanging(cycle) else {member: serials[member] for member in cycle}
            for peer in wait.awaited:
                if peer not in came_from:
                    came_from[peer] = rank
                    frontier.append(peer)
        return {}

    def _may_be_exchanging(self, cycle: Sequence[int]) -> bool:
        """Whether one of two ranks sends what the other receives. See [Note: no false alarm]."""
        waits = [wait for rank in cycle if (wait := self._wait_of(rank)) is not None]
        verbs = sorted(wait.where.partition("(")[0] for wait in waits)
        are_meant = len({(wait.group, wait.tag) for wait in waits}) == 1
        return len(cycle) == 2 and verbs == ["recv", "send"] and are_meant

    # ---- the error ------------------------------------------------------------------------------

    def _explain(self) -> tuple[str, tuple[int, ...]]:
        """The text of the error, and the culprits: the global ranks outside the majority; empty without a majority."""
        waits = dict(self._published_waits())
        parties: dict[str, list[int]] = {}
        for rank, wait in waits.items():
            parties.setdefault(wait.group, []).append(rank)
        largest = max(len(ranks) for ranks in parties.values())
        majorities = [ranks for ranks in parties.values() if len(ranks) == largest]
        culprits: list[int] = []
        if len(majorities) == 1:
            culprits = sorted(rank for ranks in parties.values() if ranks is not majorities[0] for rank in ranks)
        lines = [
            f"  {self._name(rank)} waits in {wait.where} for {'rank' if len(wait.awaited) == 1 else 'ranks'} "
            f"{', '.join(map(str, wait.awaited))}"
            for rank, wait in waits.items()
        ]
        is_of_messages = any(wait.where.startswith(("recv(", "send(")) for wait in waits.values())
        advice = _ORDER_OF_MESSAGES if is_of_messages else _ORDER_OF_GROUPS
        text = f"{WAIT_FOR_EACH_OTHER}:\n" + "\n".join(lines) + f"\n{advice}"
        return text, tuple(culprits)

    def _name(self, rank: int) -> str:
        identity = self._waits.identity(rank)
        return f"rank {rank} ({identity.host}, pid {identity.pid})"

    def _published_waits(self) -> Iterator[tuple[int, _Wait]]:
        for rank in range(self._waits.world_size):
            wait = self._wait_of(rank)
            if wait is not None:
                yield rank, wait
