"""How the ranks of one host wait for each other: counters in shared memory, no locks, no sockets.

Every rank owns one block of the control segment and is the only one to write it. Its first
word counts the rank's *steps*. To take a step, a rank stores count + 1 and waits until every
peer's count has reached it: a barrier of one store and W - 1 loads.

[Note: memory order] What a rank wrote before its step must be visible to a peer that has seen
the step. x86 keeps stores in order. Elsewhere `fence` goes through an uncontended lock twice:
the release of the first and the acquire of the second order everything around them.

[Note: waiting] First spin (the peer is on another core and microseconds away), then yield the core, then sleep until
the peer's step wakes this rank (the peer computes, and needs the cores; `futex.py`). Where the kernel has no such sleep
there are short naps. A yield that takes long has let somebody else run here. Where there are cores for
all ranks that may be the very peer, put on this core by the scheduler, and the two would go on taking turns; so
the rank takes a nap of a microsecond, because whoever wakes up is given an idle core. Where ranks outnumber cores
there is none to be given and a nap costs a time slice. Only the slow part looks at clocks and at the state of
peers, so trouble is noticed within milliseconds and costs nothing when there is none.

[Note: looks] A look costs a tenth of a millisecond, and a sleeper wakes up for it. Where ranks outnumber cores
that time is the computing rank's: with a look every 2 ms, 31 waiting ranks on two cores took all of both. So looks
become rarer the longer a wait lasts, down to one in 50 ms: a rank that dies, fails or closes its group is
then noticed that much later. A step wakes the sleeper at once, however long it has slept.

[Note: steps taken back] A rank that gives up waiting takes its own step back: it writes that it is
giving up, then the count before the step. A peer that comes later finds the step incomplete, waits,
looks, and learns why: it cannot take a collective for finished that others have given up. Only a
peer that arrives in the very moment of giving up may still pass; the next step stops it. The reason
is in the block a little later, so a rank that is giving up is not late: it will have failed soon.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Protocol

from lockstep.shm.futex import Futex
from lockstep.shm.liveness import Watch

__all__ = ["Channel", "Overseer", "PeerState", "PeerTrouble", "TroubleKind", "Waiter", "fence", "nap"]

_SLEEP_AFTER_S = 0.0003
_NAP_AFTER_S = 0.002
_SHARED_CORE_S = 0.000005  # a yield that takes longer than this has let somebody else run on this core
_SHORTEST_NAP_S = 0.000001
_LONGEST_NAP_S = 0.0005
_LOOK_EVERY_S = 0.002
_LONGEST_LOOK_S = 0.05
_LOOKS_OF_WAITED = 0.1  # of the time waited so far passes between two looks
_REASON_FOLLOWS_WITHIN_S = 5.0


class PeerState(IntEnum):
    """Where a rank stands in the life of a group. Only ever moves down this list."""

    ABSENT = 0  # has not mapped the segment yet
    READY = 1  # has mapped it and takes part
    GIVING_UP = 2  # has stopped waiting; its block will say why
    LEFT = 3  # has left in good order: its collectives are over
    FAILED = 4  # has raised; its block says what


class TroubleKind(IntEnum):
    """Why a peer cannot be waited for any longer."""

    DEAD = 0  # its process is gone
    FAILED = 1  # it raised an exception or gave up waiting; its block says what
    LEFT = 2  # it left the group
    LATE = 3  # the deadline passed
    CLOSED = 4  # this rank's own group was shut down meanwhile
    CROSSED = 5  # it waits for this rank, in another group


class PeerTrouble(Exception):  # never leaves the package: flight.explain makes a LockstepError of it
    """A wait cannot end well.

    Attributes:
        kinds: group rank -> what is wrong with it, for every rank that this one waited for in vain.
        waited_s: how long this rank had waited.
    """

    def __init__(self, kinds: Mapping[int, TroubleKind], waited_s: float) -> None:
        super().__init__(kinds, waited_s)
        self.kinds = dict(kinds)
        self.waited_s = waited_s

    def ranks(self, kind: TroubleKind) -> list[int]:
        """Those with that trouble, in order."""
        return sorted(rank for rank, one in self.kinds.items() if one is kind)


if platform.machine() in ("x86_64", "AMD64", "i686"):

    def fence() -> None:
        """Order the stores before it against the stores after it. See [Note: memory order]."""

else:
    _fence_lock = threading.Lock()

    def fence() -> None:
        """Order the stores before it against the stores after it. See [Note: memory order]."""
        with _fence_lock:
            pass
        with _fence_lock:
            pass


_libc = ctypes.CDLL(None)
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30


def nap(seconds: float) -> None:
    """Sleep, to the microsecond: by default the kernel adds up to 50 to wake several sleepers at once."""
    slack_ns = _libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)
    _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    time.sleep(min(seconds, _LONGEST_NAP_S))
    _libc.prctl(_PR_SET_TIMERSLACK, max(slack_ns, 0), 0, 0, 0)


def _next_look(start: float, now: float, timeout_s: float) -> float:
    """When a wait that began at `start` looks at its peers again: rarely in the end. See [Note: looks]."""
    soon = now + _LOOK_EVERY_S
    pause_s = min((now - start) * _LOOKS_OF_WAITED, _LONGEST_LOOK_S)
    return max(soon, min(now + pause_s, start + timeout_s))


class Overseer(Protocol):
    """Looks at a wait from further away than the waiter does: at what the ranks do in other groups."""

    def look(self, missing: Sequence[int], waited_s: float, timeout_s: float) -> None:
        """The ranks `missing` have not come yet, of `timeout_s` seconds. Raises PeerTrouble if they never will."""

    def end(self) -> None:
        """The wait is over."""


class Waiter:
    """Waits for words of shared memory to reach a value, and notices when they never will.

    Args:
        words: the control segment as 64-bit words.
        state_words: index of each rank's state word.
        rank: this rank.
        watch: liveness of the peers' processes.
        bell_words: index of each rank's bell: not 0 if somebody sleeps until its word changes. None: nobody does.

    Attributes:
        overseer: asked in every look that finds no trouble, if there is one.
    """

    def __init__(
        self,
        words: memoryview,
        state_words: Sequence[int],
        rank: int,
        watch: Watch,
        bell_words: Sequence[int] | None = None,
    ) -> None:
        self._words = words
        self._state_words = state_words
        self._bell_words = bell_words or ()
        self._futex = Futex(words) if bell_words is not None and Futex.is_supported() else None
        self._rank = rank
        self._watch = watch
        self.closed = False
        self.overseer: Overseer | None = None
        cores = len(os.sched_getaffinity(0))
        self._has_own_core = len(state_words) <= cores
        # Spinning holds the GIL and a core: a few microseconds where each rank has a core of its
        # own, next to nothing where a peer may need this very core to arrive.
        self.spins = 300 if self._has_own_core else 4
        self._yields_per_look = 1 if self._has_own_core else 16

    def wait(self, words: memoryview, pending: Sequence[tuple[int, int]], target: int, timeout_s: float) -> None:
        """Return when every pending word is at least `target`.

        Args:
            words: where the words lie (any shared 64-bit words, not only the control segment).
            pending: (rank, index of its word) for each peer to wait for.
            target: the value to reach.
            timeout_s: seconds until PeerTrouble of kind LATE.

        Raises:
            PeerTrouble: a pending rank died, failed or left, or the deadline passed.
        """
        for _, index in pending:
            if words[index] >= target:
                continue
            for _ in range(self.spins):
                if words[index] >= target:
                    break
            else:
                try:
                    self._wait_slowly(words, pending, target, timeout_s)
                finally:
                    if self.overseer is not None:
                        self.overseer.end()
                return

    def _wait_slowly(
        self, words: memoryview, pending: Sequence[tuple[int, int]], target: int, timeout_s: float
    ) -> None:
        start = before = time.monotonic()
        next_look = _next_look(start, start, timeout_s)
        position, count = 0, len(pending)  # ranks before `position` have come
        while True:
            for _ in range(self._yields_per_look):
                while words[pending[position][1]] >= target:
                    position += 1
                    if position == count:
                        # Those who came first may have taken their step back while this rank waited for the last.
                        if all(words[index] >= target for _, index in pending):
                            return
                        position = 0
                os.sched_yield()
            now = time.monotonic()
            if now >= next_look:
                self.look(words, pending, target, now - start, timeout_s)
                next_look = _next_look(start, now, timeout_s)
            if self._futex is not None and now - start > _SLEEP_AFTER_S:
                rank, index = pending[position]
                self._sleep(self._futex, index, self._bell_words[rank], target, next_look - now)
            elif now - start > _NAP_AFTER_S:
                nap((now - start) / 20)
            elif self._has_own_core and now - before > _SHARED_CORE_S:
                nap(_SHORTEST_NAP_S)
            before = time.monotonic()

    def _sleep(self, futex: Futex, index: int, bell: int, target: int, limit_s: float) -> None:
        """Sleep until the word changes, or for `limit_s`. See [Note: missed wake-ups] in futex.py."""
        words = self._words
        words[bell] = 1
        fence()
        seen = words[index]
        if seen < target:
            futex.sleep(index, seen, max(limit_s, 0.0))

    def wake(self, index: int) -> None:
        """Wake those that sleep until that word of this rank changes. Local."""
        self._words[self._bell_words[self._rank]] = 0
        if self._futex is not None:
            self._futex.wake(index)

    def look(
        self,
        words: memoryview,
        pending: Sequence[tuple[int, int]],
        target: int,
        waited_s: float,
        timeout_s: float,
    ) -> None:
        """Raise PeerTrouble if a rank that is still awaited cannot come any more."""
        if self.closed:
            raise PeerTrouble({self._rank: TroubleKind.CLOSED}, waited_s)
        dead = set(self._watch.dead())
        states = {rank: self._words[self._state_words[rank]] for rank, _ in pending}
        # Read the words last: a peer that arrived and left after that has kept its promise.
        missing = [rank for rank, index in pending if words[index] < target]
        kinds: dict[int, TroubleKind] = {}
        for rank in missing:
            # What a rank said before it died says more than its death.
            if states[rank] == PeerState.FAILED:
                kinds[rank] = TroubleKind.FAILED
            elif states[rank] == PeerState.LEFT:
                kinds[rank] = TroubleKind.LEFT
            elif rank in dead:
                kinds[rank] = TroubleKind.DEAD
        if not kinds and waited_s >= timeout_s:
            late = missing
            if waited_s < timeout_s + _REASON_FOLLOWS_WITHIN_S:
                late = [rank for rank in missing if states[rank] != PeerState.GIVING_UP]
            kinds = dict.fromkeys(late, TroubleKind.LATE)
        if kinds:
            raise PeerTrouble(kinds, waited_s)
        if missing and self.overseer is not None:
            self.overseer.look(missing, waited_s, timeout_s)

    def give_up(self) -> None:
        """Let the peers know that a reason for not coming will follow. See [Note: steps taken back]."""
        state = self._state_words[self._rank]
        if self._words[state] == PeerState.READY:
            self._words[state] = PeerState.GIVING_UP


class Channel:
    """The step counter of one group: every rank takes the same steps in the same order.

    Args:
        words: the control segment as 64-bit words.
        step_words: index of each rank's step word.
        rank: this rank.
        waiter: how to wait.
        bell_word: index of this rank's bell, which asks for a call of `waiter.wake`.

    Attributes:
        count: steps taken so far.
        waiter: how to wait.
    """

    def __init__(self, words: memoryview, step_words: Sequence[int], rank: int, waiter: Waiter, bell_word: int) -> None:
        self._words = words
        self._mine = step_words[rank]
        self._bell = bell_word
        self._peers = [(peer, word) for peer, word in enumerate(step_words) if peer != rank]
        self.waiter = waiter
        self.count = 0

    def step(self, timeout_s: float) -> None:
        """Arrive, and wait until every rank has. Collective.

        Raises:
            PeerTrouble: a rank cannot come, or did not come in time. See [Note: steps taken back].
        """
        self.count = count = self.count + 1
        fence()
        words = self._words
        words[self._mine] = count
        if words[self._bell]:
            self.waiter.wake(self._mine)
        for peer in self._peers:
            if words[peer[1]] < count:
                try:
                    self.waiter.wait(words, self._peers, count, timeout_s)
                except BaseException:
                    self.waiter.give_up()
                    fence()
                    words[self._mine] = count - 1
                    raise
                break
        fence()
