"""How the ranks of one host wait for each other: counters in shared memory, no locks, no sockets.

Every rank owns one block of the control segment, which only it writes. Its first word counts the rank's *steps*. To
take a step, a rank stores count + 1 and waits until every peer's count has reached it: a barrier of one store and W - 1
loads.

[Note: memory order] What a rank wrote before its step must be visible to a peer that has seen the step. x86 keeps
stores in order. On other processors `fence` goes through an uncontended lock twice: the release of the first and the
acquire of the second order everything around them.

[Note: waiting] First spin (the peer is on another core and microseconds away), then yield the core, then sleep until
the last peer's step wakes this rank (it computes, and needs the cores; `futex.py`). Without kernel support for such a
sleep, there are short naps. If a yield takes long, another thread has run here. If there are cores for all ranks, that
may be the very peer, which the scheduler has put on this core, and the two would keep taking turns. So the rank goes to
sleep, because the scheduler gives a thread that wakes up an idle core. If another program has the core, no rank yields
for a while ([Note: lost cores] in cores.py). Only the slow path checks clocks and the state of peers, so looking for
failures costs nothing while there are none.

[Note: gate] The sleepers of a group sleep on one word, the gate, and one call wakes them all. The rank that takes the
last missing step makes that call, so nobody wakes up to find that others are still missing. A rank that is about to
sleep reads the gate, writes the number of the step into the bell, checks once more whether all have arrived, and sleeps
unless the gate has changed. A rank that has seen all others arrive reads the bell, and opens the gate if the bell names
this step. If two ranks arrive at the same moment, and each misses the other at first, both check again and see the
bell; a bell for a later step is left alone.

[Note: looks] A look is a check of the peers; it costs a tenth of a millisecond and more, and a sleeper has to wake up
for it. If ranks outnumber cores that time is taken from the rank that computes: with a look every 2 ms, 31 waiting
ranks on two cores took all of both. So the first comes after a tenth of a second, and then one a second. Failures that
an alarm can announce wake the sleepers at once ([Note: alarm]). Looks are for the others: the deadline, ranks that wait
for each other in different groups (their detector says when it wants the next look), a rank that is suspended. In
addition, a sleeper wakes up once, soon after it has fallen asleep, to see whether a wake-up was missed ([Note: missed
wake-ups] in `futex.py`). If no alarm announces deaths (`Watch.must_ask`), or a waiter receives messages in its looks,
there are five looks a second, and more in the first second.

[Note: alarm] A rank that learns of a failure first records it (in its state, or, for the death of a peer, in its own
process), then counts the alarm, then changes the gate and wakes all that sleep there. A sleeper reads the gate, then
the alarm, then sleeps unless the gate has changed; and it checks its peers whenever the alarm has changed. So no alarm
is missed: if two ranks count at the same moment, each has recorded its reason before. All ranks wake up for any alarm;
the first process that learns of a death tells the others. An alarm writes a random number into the gate, on which
nobody can have slept.

[Note: steps taken back] A rank that gives up waiting takes its own step back: it writes that it is giving up, then the
count before the step. A peer that arrives later finds the step incomplete, waits, looks, and learns why: it cannot
treat a collective as finished that others have given up. Only a peer that arrives at the very moment of giving up may
still pass; the next step stops it. The reason is written into the block a little later, so a rank that is giving up
does not count as late: it will have failed soon.
"""

from __future__ import annotations

import math
import os
import platform
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Protocol

from lockstep.shm.cores import LOST_AFTER_S, LOST_BY_OWNER_AFTER_S, nap, own_cores
from lockstep.shm.futex import Futex
from lockstep.shm.liveness import Watch

__all__ = [
    "MISSED_AFTER_S",
    "FailureKind",
    "Overseer",
    "PeerFailure",
    "PeerState",
    "StepCounter",
    "StepWaiter",
    "fence",
    "next_look",
    "random_word",
]

_SPINS_OF_MANY = 4
_SLEEP_AFTER_S = 0.0003
_NAP_AFTER_S = 0.002
_UNCONTENDED_YIELD_S = 0.000005  # if a yield of a step takes longer, another thread has run on this core
MISSED_AFTER_S = 0.002  # length of a first sleep; see [Note: missed wake-ups] in futex.py
_RANKS_PER_CORE = 4  # if more ranks share a core, they all take longer to arrive, and a first sleep is longer
_LOOK_EVERY_S = 0.002
# The time between two looks is at most this multiple of the time waited so far, and at most this many seconds.
_LOOKS_OF_WAITED, _LONGEST_LOOK_S = 0.3, 0.2
# If an alarm wakes the wait: seconds until the first look, and between further ones.
_FIRST_LOOK_IF_WOKEN_S, _LOOK_EVERY_IF_WOKEN_S = 0.1, 1.0
_RANDOM_BITS = 62
_REASON_FOLLOWS_WITHIN_S = 5.0


class PeerState(IntEnum):
    """The state of a rank in the life of a group. Only ever moves down this list."""

    ABSENT = 0  # has not mapped the segment yet
    READY = 1  # has mapped it and takes part
    GIVING_UP = 2  # has stopped waiting; its block will say why
    LEFT = 3  # has left in good order: its collectives are over
    FAILED = 4  # has raised an exception; its block says which


class FailureKind(IntEnum):
    """Why a peer cannot be waited for any longer."""

    DEAD = 0  # its process has ended
    FAILED = 1  # it raised an exception or gave up waiting; its block says what
    LEFT = 2  # it left the group
    LATE = 3  # the deadline passed
    CLOSED = 4  # this rank's own group was shut down meanwhile
    DEADLOCKED = 5  # it is waiting for this rank, in another group


class PeerFailure(Exception):  # never leaves the package: recorder.explain makes a LockstepError of it
    """A wait that cannot succeed, because of a peer or of this rank itself.

    Attributes:
        kinds: group rank -> how it failed, for every rank that this one waited for in vain.
        waited_s: how long this rank has waited, in seconds.
    """

    def __init__(self, kinds: Mapping[int, FailureKind], waited_s: float) -> None:
        super().__init__(kinds, waited_s)
        self.kinds = dict(kinds)
        self.waited_s = waited_s

    def ranks(self, kind: FailureKind) -> list[int]:
        """The ranks that failed in that way, in order."""
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


def next_look(start: float, now: float, timeout_s: float, is_woken: bool = False) -> float:
    """The time of the next look in a wait that began at `start`: looks become rare. See [Note: looks].

    Args:
        start: monotonic time at which the wait began, in seconds.
        now: monotonic time, in seconds.
        timeout_s: seconds from `start` to the deadline, at which there is always a look.
        is_woken: an alarm wakes this wait, so that its looks may be rarer.
    """
    if is_woken:
        pause_s = _LOOK_EVERY_IF_WOKEN_S if now > start else _FIRST_LOOK_IF_WOKEN_S
    else:
        pause_s = min((now - start) * _LOOKS_OF_WAITED, _LONGEST_LOOK_S)
    return max(now + _LOOK_EVERY_S, min(now + pause_s, start + timeout_s))


def random_word() -> int:
    """A random positive number: in practice no word of shared memory has held it before."""
    return secrets.randbits(_RANDOM_BITS)


class Overseer(Protocol):
    """Checks a wait in a wider context than the waiter: what the ranks do in other groups."""

    def look(self, missing: Sequence[int], waited_s: float, timeout_s: float) -> float:
        """Check a wait for the ranks `missing`; raises PeerFailure if they will never arrive.

        Args:
            missing: ranks that have not arrived.
            waited_s: seconds waited so far.
            timeout_s: seconds from the beginning of the wait to the deadline.

        Returns:
            Seconds after which to call this again.
        """

    def end(self) -> None:
        """Note that the wait has ended."""


class StepWaiter:
    """Waits for words of shared memory to reach a value, and notices when they never will.

    Args:
        words: the control segment as 64-bit words.
        state_words: index of each rank's state word.
        rank: this rank.
        watch: monitors whether the peers' processes are alive.
        gate_word: index of the gate, on which waits in these words sleep; its bell and its alarm follow it.

    Attributes:
        overseers: called in every look that finds no failure.
        closed: whether this rank has left the group, so that every wait ends.
    """

    polls_in_looks = False  # whether looks also receive messages, which no alarm announces

    def __init__(self, words: memoryview, state_words: Sequence[int], rank: int, watch: Watch, gate_word: int) -> None:
        self._words = words
        self._state_words = state_words
        self._gate = gate_word
        self._futex = Futex(words) if Futex.is_supported() else None
        self._rank = rank
        self._watch = watch
        self.closed = False
        self.overseers: list[Overseer] = []
        cores = len(os.sched_getaffinity(0))
        self._has_own_core = len(state_words) <= cores
        # Spinning holds the GIL and a core: a few microseconds if each rank has its own core, next to nothing if a peer
        # may need this very core to arrive.
        self.spins = 300 if self._has_own_core else _SPINS_OF_MANY
        self._lost_after_s = LOST_BY_OWNER_AFTER_S if self._has_own_core else LOST_AFTER_S
        self._crowd = max(1.0, len(state_words) / cores / _RANKS_PER_CORE)
        self._yield_for_s = _NAP_AFTER_S if self._futex is None else _SLEEP_AFTER_S

    def wait(self, words: memoryview, pending: Sequence[tuple[int, int]], target: int, timeout_s: float) -> None:
        """Wait until every pending word is at least `target`.

        Args:
            words: memory that contains the words (any shared 64-bit words, not only the control segment).
            pending: (rank, index of its word) for each awaited peer.
            target: the value to reach.
            timeout_s: seconds until PeerFailure of kind LATE.

        Raises:
            PeerFailure: a pending rank died, failed or left, or the deadline passed.
        """
        for _, index in pending:
            if words[index] >= target:
                continue
            for _ in range(_SPINS_OF_MANY if own_cores.are_lost else self.spins):
                if words[index] >= target:
                    break
            else:
                try:
                    self._wait_slowly(words, pending, target, timeout_s)
                finally:
                    for overseer in self.overseers:
                        overseer.end()
                return

    def _wait_slowly(
        self, words: memoryview, pending: Sequence[tuple[int, int]], target: int, timeout_s: float
    ) -> None:
        start = now = time.monotonic()
        num_alarms, is_woken = self.num_alarms, self.failures_wake_waits
        look_at = next_look(start, start, timeout_s, is_woken)
        may_yield = own_cores.may_yield(start)
        gate: int | None = None  # its value at the last sleep
        position, count = 0, len(pending)  # ranks before `position` have arrived
        while True:
            while words[pending[position][1]] >= target:
                position += 1
                if position == count:
                    # The first to arrive may have taken their step back while this rank waited for the last.
                    if all(words[index] >= target for _, index in pending):
                        return
                    position = 0
            if now >= look_at:
                num_alarms = self.num_alarms
                again_s = self.look(words, pending, target, now - start, timeout_s)
                look_at = min(next_look(start, now, timeout_s, is_woken), now + again_s)
            if may_yield and now - start < self._yield_for_s:
                before = now
                now = own_cores.give_up(before, self._lost_after_s)
                may_yield = now - before < (_UNCONTENDED_YIELD_S if self._has_own_core else _SLEEP_AFTER_S)
            else:
                if self._futex is None:
                    nap((now - start) / 20)
                else:
                    gate = self._sleep(words, pending, target, num_alarms, look_at - now, gate)
                now = time.monotonic()
                if num_alarms != self.num_alarms:
                    look_at = now

    def _sleep(
        self,
        words: memoryview,
        pending: Sequence[tuple[int, int]],
        target: int,
        num_alarms: int,
        timeout_s: float,
        slept_at: int | None,
    ) -> int:
        """Sleep until the gate opens, or for at most `timeout_s`. See [Note: gate] and [Note: alarm].

        Returns:
            The value of the gate while asleep, to be passed to the next sleep of this wait as `slept_at`.
        """
        assert self._futex is not None
        gate = self._words[self._gate]
        fence()
        if gate != slept_at or self._words[self._gate + 1] != target:
            self._words[self._gate + 1] = target
            fence()
            timeout_s = min(timeout_s, MISSED_AFTER_S * self._crowd)
        if num_alarms == self.num_alarms and any(words[index] < target for _, index in pending):
            self._futex.sleep(self._gate, gate, max(timeout_s, 0.0))
        return gate

    def open_gate(self, count: int) -> None:
        """Wake the sleeping ranks, because all have arrived at step `count`. Local."""
        self._words[self._gate + 1] = 0
        fence()
        self._words[self._gate] = count * len(self._state_words) + self._rank  # different for each rank
        if self._futex is not None:
            self._futex.wake(self._gate)

    @property
    def failures_wake_waits(self) -> bool:
        """Whether a failure wakes a wait, so that it needs to look only rarely."""
        return self._futex is not None and not self.polls_in_looks and not self._watch.must_ask

    @property
    def num_alarms(self) -> int:
        """Number of alarms of the group so far."""
        return self._words[self._gate + 2]

    def sound_alarm(self) -> None:
        """Make all waits of the group look at once. Local; any thread may call it, after recording the failure."""
        fence()
        self._words[self._gate + 2] += 1
        fence()
        self._words[self._gate] = random_word()
        if self._futex is not None:
            self._futex.wake(self._gate)

    def close(self) -> None:
        """End this rank's waits, current and future. Local; any thread may call it."""
        self.closed = True
        self.sound_alarm()

    def look(
        self,
        words: memoryview,
        pending: Sequence[tuple[int, int]],
        target: int,
        waited_s: float,
        timeout_s: float,
    ) -> float:
        """Raise PeerFailure if an awaited rank can no longer arrive.

        Returns:
            Seconds after which the overseer wants the next look.
        """
        if self.closed:
            raise PeerFailure({self._rank: FailureKind.CLOSED}, waited_s)
        dead = set(self._watch.dead())
        states = {rank: self._words[self._state_words[rank]] for rank, _ in pending}
        # Read the words last: a peer that arrived and then left has done its part.
        missing = [rank for rank, index in pending if words[index] < target]
        kinds: dict[int, FailureKind] = {}
        for rank in missing:
            # What a rank said before it died is more informative than its death.
            if states[rank] == PeerState.FAILED:
                kinds[rank] = FailureKind.FAILED
            elif states[rank] == PeerState.LEFT:
                kinds[rank] = FailureKind.LEFT
            elif rank in dead:
                kinds[rank] = FailureKind.DEAD
        if not kinds and waited_s >= timeout_s:
            late = missing
            if waited_s < timeout_s + _REASON_FOLLOWS_WITHIN_S:
                late = [rank for rank in missing if states[rank] != PeerState.GIVING_UP]
            kinds = dict.fromkeys(late, FailureKind.LATE)
        if kinds:
            raise PeerFailure(kinds, waited_s)
        if not missing:
            return math.inf
        return min((each.look(missing, waited_s, timeout_s) for each in self.overseers), default=math.inf)

    def give_up(self) -> None:
        """Announce that a reason for not arriving will follow. See [Note: steps taken back]."""
        state = self._state_words[self._rank]
        if self._words[state] == PeerState.READY:
            self._words[state] = PeerState.GIVING_UP


class StepCounter:
    """The step counter of one group: every rank takes the same steps in the same order.

    Args:
        words: the control segment as 64-bit words.
        step_words: index of each rank's step word.
        rank: this rank.
        waiter: waits for words of the segment.
        bell_word: index of the bell, which requests a call of `waiter.open_gate`.

    Attributes:
        count: steps taken so far, including those of earlier counters over the same word of this rank.
        waiter: waits for words of the segment.
    """

    def __init__(
        self, words: memoryview, step_words: Sequence[int], rank: int, waiter: StepWaiter, bell_word: int
    ) -> None:
        self._words = words
        self._mine = step_words[rank]
        self._bell = bell_word
        self._peers = [(peer, word) for peer, word in enumerate(step_words) if peer != rank]
        self.waiter = waiter
        self.count = words[self._mine]

    def step(self, timeout_s: float) -> None:
        """Arrive, and wait until every rank has. Collective.

        Raises:
            PeerFailure: a rank cannot arrive, or did not in time. See [Note: steps taken back].
        """
        self.count = count = self.count + 1
        fence()
        words = self._words
        words[self._mine] = count
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
        if 0 < words[self._bell] <= count:
            self.waiter.open_gate(count)
        fence()
