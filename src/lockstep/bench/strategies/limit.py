"""How much of an epoch, or of an evaluation, is done where all of it would take longer than a run may."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["WHOLE", "Limit"]


@dataclass(frozen=True)
class Limit:
    """Where an epoch ends that would take too long.

    Attributes:
        steps: after so many; None: after all.
        seconds: after so many, for one process alone, since each rank has a clock of its own; None: never.
    """

    steps: int | None = None
    seconds: float | None = None

    def is_reached(self, steps: int, began_s: float) -> bool:
        """Whether to end here. Local.

        Args:
            steps: done so far.
            began_s: when the first one began, monotonic.
        """
        return steps == self.steps or (self.seconds is not None and time.monotonic() - began_s > self.seconds)


WHOLE = Limit()
