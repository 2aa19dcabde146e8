"""How a wait gives up its core: it yields if the core is idle or a peer needs it, and sleeps if other programs compute.

[Note: lost cores] A yield takes less than a microsecond if nobody else wants the core, and as long as a peer needs if
one does. If another program is computing, a yield costs one of its time slices, 3 ms and more; a thread that is woken
from sleep is scheduled before that program instead. (Measured next to two such programs on two cores: 6.3 ms for an
all_reduce of 64 KiB with yields, 0.2 ms with sleep.) It cannot be known in advance who else wants the core. So a thread
that gets its core back late records this for its process: during a pause all waits sleep at once. Then one wait tries
to yield again. Each time the core is lost again soon after, the pause doubles, so that trying costs one percent.

[Note: shared cores] Ranks that share a core take turns at every small collective, and each finds the caches and the
branch predictor as the other left them. Measured with two groups of one rank on one core: a call takes 46 µs of CPU
time, and 97 µs if both yield after each. So four ranks on two cores need at least the time of two such calls each, 195
µs, where 200 to 245 µs were measured: other ways to wait (sleeping at once, yielding for longer) gain nothing, and only
ranks whose loops stay in the nearest cache, such as those of MPI, are an order of magnitude faster.
"""

from __future__ import annotations

import os
import time

from lockstep import libc

__all__ = ["LONGEST_NAP_S", "LONG_YIELD_S", "LOST_AFTER_S", "LOST_BY_OWNER_AFTER_S", "Cores", "nap", "own_cores"]

_SHORTEST_NAP_S, LONGEST_NAP_S = 0.000001, 0.0005
# If a yield of a wait for messages takes this long, another process has run. A thread that wakes up from sleep is
# scheduled before that process.
LONG_YIELD_S = 0.00002
# Peers that share the core give it back earlier, the more so if each rank should have its own core.
LOST_AFTER_S = 0.001
LOST_BY_OWNER_AFTER_S = 0.0003
_SHORTEST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_SOON = 10  # pauses; a loss after more than this many is unrelated

_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30


def nap(seconds: float) -> None:
    """Sleep for 1 to 500 µs, exactly: by default the kernel adds up to 50 µs to wake several sleepers at once."""
    slack_ns = libc.call("prctl", _PR_GET_TIMERSLACK, 0, 0, 0, 0)
    libc.call("prctl", _PR_SET_TIMERSLACK, 1, 0, 0, 0)
    time.sleep(max(min(seconds, LONGEST_NAP_S), _SHORTEST_NAP_S))
    libc.call("prctl", _PR_SET_TIMERSLACK, max(slack_ns, 0), 0, 0, 0)


class Cores:
    """Whether threads of this process get their core back soon after a yield. See [Note: lost cores].

    Attributes:
        are_lost: the last wait was told not to yield.
    """

    def __init__(self) -> None:
        self.are_lost = False
        self._lost_until_s = 0.0
        self._pause_s = _SHORTEST_PAUSE_S

    def may_yield(self, now_s: float) -> bool:
        """Whether a wait that begins now should yield rather than sleep at once. Local; called once for each wait."""
        self.are_lost = now_s < self._lost_until_s
        return not self.are_lost

    def give_up(self, now_s: float, lost_after_s: float = LOST_AFTER_S) -> float:
        """Yield the core. Local.

        Args:
            now_s: the monotonic time.
            lost_after_s: if the yield takes longer, another program has run on the core, not a peer.

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
