"""How a wait gives up its core: by a yield where it is free or a peer needs it, by sleep where other programs compute.

[Note: lost cores] A yield takes less than a microsecond where nobody else wants the core, and as long as a peer needs
where one does. Beside a program that computes it takes one of its time slices, 3 ms and more; a thread that was asleep
and is woken comes before that program instead. (Measured beside two such programs on two cores: 6.3 ms for an
all_reduce of 64 KiB with yields, 0.2 ms with sleep.) Nothing tells beforehand who else wants the core. So a thread that
gets its core back late remembers it for its process: for a pause all waits go to sleep at once. Then one wait tries to
yield again. Each time the core is soon lost again the pause doubles, so that trying costs one part in a hundred.

[Note: shared cores] Ranks that share a core take turns at every small collective, and each finds the caches and the
branch predictor as the other left them. Measured with two groups of one rank on one core: a call takes 46 µs of
processor time, and 97 µs if both yield after each. So four ranks on two cores need at least two such calls' time
for each, 195 µs where 200 to 245 µs were measured: to wait in another way (asleep at once, yielding for longer) gains
nothing, and only ranks whose loops stay in the nearest cache, as those of MPI do, are an order of magnitude faster.
"""

from __future__ import annotations

import os
import time

from lockstep import libc

__all__ = ["LONGEST_NAP_S", "LONG_YIELD_S", "LOST_AFTER_S", "LOST_BY_OWNER_AFTER_S", "Cores", "nap", "own_cores"]

_SHORTEST_NAP_S, LONGEST_NAP_S = 0.000001, 0.0005
# A yield of a wait for messages that takes this long has gone to another process. A thread that wakes up from sleep
# runs before that one.
LONG_YIELD_S = 0.00002
# Peers that share the core give it back earlier, the more so if each should have one of its own.
LOST_AFTER_S = 0.001
LOST_BY_OWNER_AFTER_S = 0.0003
_SHORTEST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_SOON = 10  # pauses; a loss after more than so many is a new story

_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30


def nap(seconds: float) -> None:
    """Sleep for 1 to 500 µs, exactly: by default the kernel adds up to 50 µs to wake several sleepers at once."""
    slack_ns = libc.call("prctl", _PR_GET_TIMERSLACK, 0, 0, 0, 0)
    libc.call("prctl", _PR_SET_TIMERSLACK, 1, 0, 0, 0)
    time.sleep(max(min(seconds, LONGEST_NAP_S), _SHORTEST_NAP_S))
    libc.call("prctl", _PR_SET_TIMERSLACK, max(slack_ns, 0), 0, 0, 0)


class Cores:
    """Whether the threads of this process get their core back soon after a yield. See [Note: lost cores].

    Attributes:
        are_lost: the last wait was not to yield.
    """

    def __init__(self) -> None:
        self.are_lost = False
        self._lost_until_s = 0.0
        self._pause_s = _SHORTEST_PAUSE_S

    def may_yield(self, now_s: float) -> bool:
        """Whether a wait that begins now should yield, or sleep at once. Local; called once for each wait."""
        self.are_lost = now_s < self._lost_until_s
        return not self.are_lost

    def give_up(self, now_s: float, lost_after_s: float = LOST_AFTER_S) -> float:
        """Yield the core. Local.

        Args:
            now_s: the monotonic time.
            lost_after_s: if the yield takes longer, this thread has lost the core to another program, not to a peer.

        Returns:
            The monotonic time afterwards.
        """
        os.sched_yield()
        after_s = time.monotonic()
        if after_s - now_s > lost_after_s:
            is_new = after_s - self._lost_until_s > _SOON * self._pause_s
            self._pause_s = _SHORTEST_PAUSE_S if is_new else min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._lost_until_s = after_s + self._pause_s
        return after_s


own_cores = Cores()
